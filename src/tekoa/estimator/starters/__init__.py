"""The model files that `tekoa new` writes. Users change them: they import public names only."""
