"""The commands that run models or read their checkpoints."""
