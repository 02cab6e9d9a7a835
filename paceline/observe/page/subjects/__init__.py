"""The sections of a page, a module for what each is about."""
