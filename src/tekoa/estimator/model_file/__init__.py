"""Model files, and the programs built from them."""
