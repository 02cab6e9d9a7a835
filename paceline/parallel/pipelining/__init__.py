"""Pipelines: a model cut between its layers, and several micro-batches on their way through it
at once.
"""
