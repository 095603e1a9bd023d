"""Bundled models, one file each."""
