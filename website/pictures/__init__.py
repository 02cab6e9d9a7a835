"""The pictures of the concept pages, drawn from the schedules, shares and bounds that paceline
itself works with.
"""
