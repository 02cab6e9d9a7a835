"""Measurement of a cluster: devices and links, before a run and during it."""
