"""Pipelines over models that can't be traced: each stage runs the model's own forward."""
