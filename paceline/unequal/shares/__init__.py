"""Shares of work by what machines can do."""
