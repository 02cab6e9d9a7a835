"""The status of a run: as plain data, as a line of text, and as a bar on a terminal."""
