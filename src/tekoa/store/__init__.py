"""Checkpoints on disk: commit, verification, lease, retention, formats."""
