"""Bridges: paceline under libraries that people already use.

Each bridge imports its library only when it is used. Nothing else in the package imports a bridge.
"""
