"""Going on when workers are lost, and when others join."""
