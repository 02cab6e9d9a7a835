"""Records of a run: metrics, status line, summary, timeline."""
