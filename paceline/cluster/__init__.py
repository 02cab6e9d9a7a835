"""Machines and places: discovery of launchers, the topology of the job, and how workers are
started.
"""
