"""Events of a run by kinds, as a page marks them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

KINDS: Final[Mapping[str, str]] = {  # in the order of rows
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
_SIGNS: Final = (  # the first that is found in an event's words says of which kind it is
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


def kind(event: Mapping[str, Any]) -> str:
    """Return which of `KINDS` an event is of: as it says itself, or by its words."""
    said = str(event.get("event", ""))
    if said in KINDS:
        return said
    return next((name for name, sign in _SIGNS if sign.search(str(event["what"]))), "other")
