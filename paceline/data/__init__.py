"""Data: which samples go to which worker, for map-style data sets and for streams."""
