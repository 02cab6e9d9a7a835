"""Models divided between workers along the axes of the mesh; BatchNorm over the global batch."""
