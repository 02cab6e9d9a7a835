"""What a run writes down and says: metrics, status line, summary, timeline."""
