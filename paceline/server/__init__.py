"""The parameter server: all modules that run in a server process, and its messages."""
