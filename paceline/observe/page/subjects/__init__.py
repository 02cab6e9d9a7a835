"""The sections of a page, one module for each subject."""
