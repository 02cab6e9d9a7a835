"""Tensor parallelism: workers that have the same samples at the same time, and parts of each
layer.
"""
