"""Shares of work by what machines can do: their speeds, and their memory."""
