"""The parameter server and sparse tables, on both sides."""
