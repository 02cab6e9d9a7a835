"""Shares of a batch that follow the speed of workers."""
