"""Weights and programs in the formats of other libraries, out and in."""
