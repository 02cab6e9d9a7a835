"""Which of several replicas is taken for right, and from which another one is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def nearest(rank: int, sources: Sequence[int], hosts: Sequence[int]) -> int:
    """Choose the source for `rank`: one on its host if possible, spread over the sources."""
    near = [source for source in sources if hosts[source] == hosts[rank]] or sources
    return near[rank % len(near)]


def majority(hashes: Mapping[int, str]) -> tuple[str, list[int]]:
    """Return the hash that most have, and the ranks that have another.

    In a tie that of the lowest rank counts.
    """
    counts = Counter(hashes.values())
    most = max(counts.values())
    right = next(digest for _, digest in sorted(hashes.items()) if counts[digest] == most)
    return right, sorted(rank for rank, digest in hashes.items() if digest != right)
