"""The page of a run while it trains: served from a process of its own, and brought up to date as
the run's folder changes.
"""
