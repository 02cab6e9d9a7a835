"""The workers of a run: their groups, and the axes of their mesh."""
