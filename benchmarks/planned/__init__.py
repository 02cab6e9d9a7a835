"""What the planner predicts beside what others have measured and published."""
