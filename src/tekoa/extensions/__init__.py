"""Small functions from a checkpoint to the same checkpoint."""
