"""Images: arrays of them in one file, and one file per image."""
