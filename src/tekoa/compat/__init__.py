"""Other packages under their own names, so that code written for them runs unchanged."""
