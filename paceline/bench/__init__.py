"""What this cluster can do."""
