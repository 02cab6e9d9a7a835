"""The records of a run: metrics, images, events, summary and timeline, and trackers for them."""
