"""paceline and its peers, side by side: the same model, data, global batch and seeds, in one run.

`python -m benchmarks.peers --help`.
"""
