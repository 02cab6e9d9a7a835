"""How far a run is: as plain data, as a line of text, and as a bar at the bottom of a terminal."""
