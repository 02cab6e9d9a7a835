"""Comparing replicas, and what to do if they differ."""
