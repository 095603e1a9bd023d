"""Runs: directory, start, layout and check intervals."""
