"""Layers that span workers: batch normalisation over the global batch, and embeddings whose rows lie on servers."""
