"""Bridges: models of every supported library as pure functions (`ModelFns`)."""
