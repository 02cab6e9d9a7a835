"""Spans of samples of an epoch: pieces of its global batches."""

from __future__ import annotations

from typing import NamedTuple


class SampleSpan(NamedTuple):
    """A part of a global batch: its number in the epoch, and samples `start` to `stop` of it."""

    batch: int
    start: int
    stop: int
