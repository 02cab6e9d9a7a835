"""Machines and places: discovery of launchers, topology of the job, start of its workers."""
