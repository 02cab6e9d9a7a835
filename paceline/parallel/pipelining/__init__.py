"""Pipelines: a model is cut between layers, and micro-batches follow each other through it."""
