"""Chooses which of several replicas is right, and from which one a wrong replica is copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def pick_nearest_source(rank: int, sources: Sequence[int], hosts: Sequence[int]) -> int:
    """Pick a source for `rank`, on its own host if possible. Ranks are spread over the sources."""
    candidates = [source for source in sources if hosts[source] == hosts[rank]] or sources
    return candidates[rank % len(candidates)]


def find_majority(hashes: Mapping[int, str]) -> tuple[str, list[int]]:
    """Find the hash that most ranks have, and the ranks with another hash.

    In a tie, the hash of the lowest rank counts.
    """
    counts = Counter(hashes.values())
    highest_count = max(counts.values())
    majority_hash = next(
        digest for _, digest in sorted(hashes.items()) if counts[digest] == highest_count
    )
    return majority_hash, sorted(rank for rank, digest in hashes.items() if digest != majority_hash)
