"""The parameter server: everything that runs in a server process, and what is said to it."""
