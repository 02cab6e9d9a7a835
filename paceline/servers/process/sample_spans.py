"""Spans of samples of an epoch: pieces of its global batches."""

from __future__ import annotations

from typing import NamedTuple


class SampleSpan(NamedTuple):
    """Samples `start` to `stop` (exclusive) of global batch `batch` of an epoch."""

    batch: int
    start: int
    stop: int
