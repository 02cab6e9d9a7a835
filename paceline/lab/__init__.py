"""The lab: simulated clusters of hosts with links, processors and faults, on this machine.

Knows the other parts; none of them knows it.

The names below are imported when they are first used: reading a description or a fault needs
nothing of Linux.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from paceline.lab.chaos import crash, cut, join, kill, link, slow, stop, storm
    from paceline.lab.description import Description, Host, Rack, read, ready
    from paceline.lab.hosts import Cluster, cluster
    from paceline.lab.running import Outcome

__all__ = [
    "Cluster",
    "Description",
    "Host",
    "Outcome",
    "Rack",
    "cluster",
    "crash",
    "cut",
    "join",
    "kill",
    "link",
    "read",
    "ready",
    "slow",
    "stop",
    "storm",
]

_HOMES: Final = {
    "paceline.lab.chaos": ("crash", "cut", "join", "kill", "link", "slow", "stop", "storm"),
    "paceline.lab.description": ("Description", "Host", "Rack", "read", "ready"),
    "paceline.lab.hosts": ("Cluster", "cluster"),
    "paceline.lab.running": ("Outcome",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a checker is to see names that aren't there

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(
                f"module 'paceline.lab' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value  # the next use doesn't come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
