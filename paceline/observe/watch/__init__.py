"""The live page of a run: served by its own process, and updated as the run's folder changes."""
