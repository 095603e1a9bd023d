"""Reading steps: restore, load, inspect."""
