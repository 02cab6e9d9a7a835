"""Machines of different speed and memory."""
