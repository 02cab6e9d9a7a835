"""Models that are divided between workers: cuts along the axes of the mesh, and BatchNorm over
the global batch.
"""
