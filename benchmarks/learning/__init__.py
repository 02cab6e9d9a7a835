"""What a strategy does to the loss: after as many steps, and after as long on slow links.

`python -m benchmarks.learning --help`.
"""
