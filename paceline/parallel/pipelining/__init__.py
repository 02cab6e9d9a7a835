"""Pipelines: a model is cut between layers, and micro-batches go through it one behind the other."""
