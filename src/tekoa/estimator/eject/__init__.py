"""`tekoa eject`: a run as one plain Python file."""
