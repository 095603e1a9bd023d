"""`tekoa sweep`: trains a model with several settings at once."""
