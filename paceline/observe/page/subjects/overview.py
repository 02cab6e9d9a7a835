"""The beginning of a page: the verdict, the advice with what it would gain, and the figures of
the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.formatting import counted
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import figure, find, summed
from paceline.observe.page.markup import Child, Markup, element, join


def section(data: Mapping[str, Any]) -> Markup:
    """Write the verdict, the advice and the figures of one run; not what the moment of a live
    page says (`beside_now`).
    """
    verdict = element("p", {"class": "verdict"}, " ".join(data["verdict"]))
    if data.get("beside_now"):
        return join(verdict, _advice(data))
    head = element("h1", None, data["name"], " ", badge(data))
    words = data["standing"]["words"]
    standing = (
        None
        if data["standing"]["state"] in ("ended", "running")
        else element("p", {"class": "warning"}, f"It {words}.")
    )
    return join(
        head, standing, verdict, _advice(data), element("dl", {"class": "tiles"}, _tiles(data))
    )


def badge(data: Mapping[str, Any]) -> Markup:
    """Write how a run stands in a word."""
    state = data["standing"]["state"]
    return element(
        "span",
        {"class": f"state {state}"},
        {"open": "has not ended", "gone": "broken off"}.get(state, state),
    )


def _advice(data: Mapping[str, Any]) -> Markup | None:
    rows = sorted(
        data["advice"], key=lambda row: (row["gain"] is None, row["most"], -(row["gain"] or 0.0))
    )
    if not rows:
        return None
    items = (
        element(
            "li",
            None,
            element("span", {"class": "gain"}, row["saves"]) if row["saves"] else None,
            " ",
            _code(row["words"]),
        )
        for row in rows
    )
    return element(
        "div",
        {"class": "advice"},
        element("h2", None, "What to do about it"),
        element("ul", None, items),
    )


def _code(words: str) -> Markup:
    """Set what stands between backticks as code."""
    pieces = words.split("`")
    return join(
        *(element("code", None, piece) if at % 2 else piece for at, piece in enumerate(pieces))
    )


def _tiles(data: Mapping[str, Any]) -> Iterator[Markup]:
    yield _tile("loss", figure(data, ("final_loss",), scales.plain))
    yield _tile(
        "steps",
        figure(data, ("steps",), scales.whole),
        join(figure(data, ("samples",), scales.whole), " samples"),
    )
    yield _tile(
        "a step", summed(data, ("step_seconds",), scales.seconds), "mean over steps and workers"
    )
    yield _tile(
        "samples a second", figure(data, ("samples_per_second",), scales.whole), "inside steps"
    )
    yield _tile("time", figure(data, ("seconds",), scales.clock))
    if find(data, "workers") is not None:
        workers = join(
            "on ",
            figure(data, ("hosts",), scales.whole),
            f" host{'' if find(data, 'hosts') == 1 else 's'}",
        )
        yield _tile("workers", figure(data, ("workers",), scales.whole), workers)
    if find(data, "bytes_sent", "between"):
        yield _tile(
            "between hosts",
            figure(data, ("bytes_sent", "between"), scales.nbytes),
            "sent by all in a step",
        )
    count = find(data, "checkpoints", "count")
    if count:
        yield _tile("checkpoints", figure(data, ("checkpoints", "count"), scales.whole))
    events = [event for event in data["events"] if event["kind"] in ("lost", "came")]
    if events:
        yield _tile("lost or come", counted(len(events), "event"), "see below")


def _tile(name: str, value: Child, note: Child = None) -> Markup:
    small = element("small", None, note) if note is not None else None
    return element(
        "div", {"class": "tile"}, element("dt", None, name), element("dd", None, value, small)
    )
