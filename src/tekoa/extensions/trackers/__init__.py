"""Trackers: pass the committed points of a run to other tools."""
