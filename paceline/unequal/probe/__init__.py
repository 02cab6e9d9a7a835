"""Measuring a cluster."""
