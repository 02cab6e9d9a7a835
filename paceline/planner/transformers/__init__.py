"""Transformers that are given by their numbers, and the ways to divide them among devices."""
