"""Going on when workers die, leave or come."""
