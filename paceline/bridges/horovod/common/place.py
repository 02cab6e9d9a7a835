"""Makes this process one in which `import horovod` finds the bridge."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.cluster.discover import Place, copy_environment, discover_place

_FOLDER = str(Path(__file__).parents[1] / "path")


def stand_for_horovod() -> None:
    """Let this process and those that it starts find the bridge under the name of Horovod.

    It also sets the variables that Horovod's launcher sets, such as HOROVOD_RANK.
    """
    inherited = copy_environment().get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _FOLDER + (os.pathsep + inherited if inherited else "")
    os.environ.update(make_horovod_variables(discover_place()))
    sys.path.insert(1, _FOLDER)


def call_as_horovod(
    function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Call a function that imports Horovod. `horovod.run` has each worker call it."""
    stand_for_horovod()
    return function(*args, **named)


def make_horovod_variables(place: Place) -> dict[str, str]:
    """Make the variables that Horovod's launcher sets for a process in this place."""
    if place.joining:
        return {}  # it gets its rank later
    values = {
        "RANK": place.rank,
        "SIZE": place.size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_SIZE": place.local_size,
        "CROSS_RANK": 0 if place.host_rank is None else place.host_rank,
        "CROSS_SIZE": place.hosts,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()}
