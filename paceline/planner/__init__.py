"""Predicts, before a run, which way of training is fastest, and whether more workers help."""
