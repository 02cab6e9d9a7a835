"""Trackers that a run is reported to."""
