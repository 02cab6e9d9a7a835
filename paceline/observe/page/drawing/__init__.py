"""What pages are drawn with: elements, axes, curves, bars, tables, and numbers that say where
they are from.
"""
