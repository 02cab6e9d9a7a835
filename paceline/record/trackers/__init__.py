"""Trackers, such as TensorBoard, that a run is reported to."""
