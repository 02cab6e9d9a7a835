"""Measuring a cluster: what each worker computes, and what each link carries."""
