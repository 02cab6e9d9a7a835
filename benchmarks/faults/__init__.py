"""What a killed worker costs: paceline, torchrun with checkpoints, torchft, on the same faults.

`python -m benchmarks.faults --help`.
"""
