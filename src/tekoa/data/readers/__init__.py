"""Readers of examples, one module per kind of storage."""
