"""One command around a model file."""
