"""Reads data patterns and turns them into batches in a reproducible order."""
