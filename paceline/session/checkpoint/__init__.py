"""What a run saves, and how it resumes."""
