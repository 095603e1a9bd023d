"""The only files that import a model library."""
