"""Turns examples into batches in a reproducible order."""
