"""Launchers of several hosts among themselves."""
