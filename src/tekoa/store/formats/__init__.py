"""The contents of a step: its index and its arrays, in each format."""
