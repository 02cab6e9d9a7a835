"""Checkpoints: what a run saves, when, and how it resumes."""
