"""Gradient compression: codings that make tensors smaller on the wire, and codecs that sum a
group's tensors through them.
"""
