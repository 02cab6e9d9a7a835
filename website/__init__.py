"""The documentation site: what `make docs` makes of docs/, examples/, docstrings and the command
line.
"""
