"""Prices of cut models: pipelines, tensor cuts, and activations that are computed again."""
