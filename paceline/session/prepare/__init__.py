"""Preparing a script's own objects for many workers: `Run.prepare`."""
