"""Runs steps of a recorded run again: replay, verify, compare two runs, find a NaN."""
