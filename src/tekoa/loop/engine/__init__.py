"""How the loops run steps: dispatch, roll-back, state hand-over."""
