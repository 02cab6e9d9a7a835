"""The sections of a page by name, each drawn from the data of one run, or of several to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from paceline.observe.page import loss
from paceline.observe.page.markup import Markup, element

Data = Mapping[str, Any]

OF_ONE: Final[Mapping[str, tuple[str, Callable[[Data], Markup | None]]]] = {
    "loss": ("Loss", loss.of_one),
}


def sections(datas: Sequence[Data]) -> dict[str, str]:
    """Return the sections of the page of these runs as HTML, by their ids, in order; those that have nothing to show are left out."""
    (data,) = datas
    found: dict[str, str] = {}
    for name, (title, draw) in OF_ONE.items():
        content = draw(data)
        if content is not None:
            found[name] = element("section", {"id": name}, element("h2", None, title), content)
    return found
