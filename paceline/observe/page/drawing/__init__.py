"""Drawings of pages: axes, curves, bars, tables, and numbers that name their field."""
