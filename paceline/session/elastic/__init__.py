"""How a run goes on when workers are lost, and when others come."""
