"""The sections of a page by name, each drawn from the data of one run, or of several to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe.page.markup import Markup, element
from paceline.observe.page.subjects import (
    checkpoints,
    compare,
    loss,
    memory,
    overview,
    pipelines,
    setup,
    time,
    timeline,
    traffic,
    workers,
)

Data = Mapping[str, Any]

OF_ONE: Final[Mapping[str, tuple[str, Callable[[Data], Markup | None]]]] = {
    "overview": ("", overview.section),
    "loss": ("Loss", loss.section),
    "throughput": ("Samples a second", time.throughput),
    "events": ("Events", timeline.section),
    "time": ("Where the time of a step went", time.section),
    "late": ("Who was late", workers.section),
    "pipelines": ("Pipelines", pipelines.section),
    "traffic": ("Traffic", traffic.section),
    "memory": ("Memory", memory.section),
    "checkpoints": ("Checkpoints", checkpoints.section),
    "setup": ("How it was set up", setup.section),
}
OF_SEVERAL: Final[Mapping[str, tuple[str, Callable[[Sequence[Data]], Markup | None]]]] = {
    "overview": ("", compare.overview),
    "loss": ("Loss", compare.loss),
    "time": ("Where the time of a step went", compare.time),
    "traffic": ("Bytes of a step", compare.traffic),
    "differences": ("What differs in their settings", compare.differences),
}


def sections(datas: Sequence[Data]) -> dict[str, str]:
    """Return the sections of the page of these runs as HTML, by their ids, in order; those that
    have nothing to show are left out.

    Raises UsageError for a run whose summary has something else in a field than this version writes
    there.
    """
    found: dict[str, str] = {}
    for name, title in titles(datas).items():
        content = _drawn(datas, name)
        if content is not None:
            found[name] = element(
                "section", {"id": name}, element("h2", None, title) if title else None, content
            )
    return found


def titles(datas: Sequence[Data]) -> dict[str, str]:
    """Return the titles of all sections that the page of these runs may have; that of the first
    is empty.
    """
    return {name: title for name, (title, _) in (OF_ONE if len(datas) == 1 else OF_SEVERAL).items()}


def _drawn(datas: Sequence[Data], name: str) -> Markup | None:
    try:
        return OF_ONE[name][1](datas[0]) if len(datas) == 1 else OF_SEVERAL[name][1](datas)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        names = ", ".join(str(data["name"]) for data in datas)
        raise UsageError(
            f"the summary of {names} has something in a field that is not of this version of "
            f"paceline ({error!r}, for the section "
            f"{name}): make the page with the version that the run was made with"
        ) from error
