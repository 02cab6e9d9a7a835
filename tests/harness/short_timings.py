"""Shorter timings for jobs under test: nothing that a test shows depends on how long a default is
(`tests/test_timings.py` has those).

Only waits that end by themselves are shorter everywhere. What tells a slow process from a lost one
stays as it is, unless a test says otherwise: a busy machine is slow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

# before a worker is started again
USUAL: dict[str, dict[str, float]] = {"replacement": {"backoff": 0.1}}
# of a supervisor whose workers show by themselves which one has failed first, however slowly
CAUSE = {"echo": 60.0, "last_words": 60.0}
# of a supervisor whose workers all end once they are asked to, however slowly
UNHURRIED = {"asked_term": 60.0, "asked_kill": 60.0}
# hosts that may join a job that runs: they look for it, and it for them
MEETING: dict[str, dict[str, float]] = {
    "rendezvous": {"invitation": 1.5},
    # hosts that are killed are missed at once
    "membership": {"visit": 0.2, "silence": 60.0, "call": 60.0},
}


def environ(**groups: Mapping[str, float]) -> dict[str, str]:
    """Make the variable by which all processes of a job have these timings, and the shorter
    usual ones.
    """
    names = USUAL.keys() | groups.keys()
    return {
        "PACELINE_TIMINGS": json.dumps(
            {name: {**USUAL.get(name, {}), **groups.get(name, {})} for name in sorted(names)}
        )
    }
