"""Kinds of events, which a page shows by different marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

# Kinds in the order of their rows, with the titles of the rows.
EVENT_KINDS: Final[Mapping[str, str]] = {
    "lost": "lost",
    "came": "came",
    "evicted": "late",
    "shares": "shares",
    "codec": "codec",
    "link": "link",
    "checkpoint": "checkpoint",
    "fault": "fault",
    "other": "other",
}
# Patterns of the words of an event, for events that don't say their kind. The first match counts.
_KIND_PATTERNS: Final = (
    (
        "lost",
        re.compile(
            r"\b(was|were) lost\b|waiting for others|replicas have parted|has other parameters"
        ),
    ),
    ("came", re.compile(r"\bhas come\b|new worker")),
    ("evicted", re.compile(r"\blate in\b|the others wait\b|it leaves\b")),
    ("shares", re.compile(r"\bshares\b|split\b")),
    ("codec", re.compile(r"\bcodec\b")),
    ("link", re.compile(r"\blinks? (of|between)\b|\bexchanges take\b")),
    ("checkpoint", re.compile(r"\bsaved\b|\bcheckpoint")),
    ("fault", re.compile(r"^stopped\b")),
)


def classify_event(event: Mapping[str, Any]) -> str:
    """Return the kind of an event: as it says itself, or by its words."""
    stated_kind = str(event.get("event", ""))
    if stated_kind in EVENT_KINDS:
        return stated_kind
    return next((name for name, sign in _KIND_PATTERNS if sign.search(str(event["what"]))), "other")
