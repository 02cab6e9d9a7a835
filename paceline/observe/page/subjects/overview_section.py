"""The beginning of a page: verdict, advice with its gain, and figures of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.formatting import format_count
from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import draw_figure, draw_sum, find_field
from paceline.observe.page.markup import Child, Markup, element, join_markup


def draw_overview(data: Mapping[str, Any]) -> Markup:
    """Draw the verdict, the advice and the figures of one run.

    On a live page (`beside_now`), the figures are left out, because the section "now" has them.
    """
    verdict = element("p", {"class": "verdict"}, " ".join(data["verdict"]))
    if data.get("beside_now"):
        return join_markup(verdict, _draw_advice(data))
    head = element("h1", None, data["name"], " ", draw_badge(data))
    words = data["standing"]["words"]
    standing = (
        None
        if data["standing"]["state"] in ("ended", "running")
        else element("p", {"class": "warning"}, f"It {words}.")
    )
    return join_markup(
        head,
        standing,
        verdict,
        _draw_advice(data),
        element("dl", {"class": "tiles"}, _draw_tiles(data)),
    )


def draw_badge(data: Mapping[str, Any]) -> Markup:
    """Draw the state of a run in a word."""
    state = data["standing"]["state"]
    return element(
        "span",
        {"class": f"state {state}"},
        {"open": "has not ended", "gone": "broken off"}.get(state, state),
    )


def _draw_advice(data: Mapping[str, Any]) -> Markup | None:
    """Draw the advice: known gains first, the largest on top."""
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
            _draw_code(row["words"]),
        )
        for row in rows
    )
    return element(
        "div",
        {"class": "advice"},
        element("h2", None, "What to do about it"),
        element("ul", None, items),
    )


def _draw_code(words: str) -> Markup:
    """Draw text between backticks as code."""
    pieces = words.split("`")
    return join_markup(
        *(element("code", None, piece) if at % 2 else piece for at, piece in enumerate(pieces))
    )


def _draw_tiles(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield the figures of the run."""
    yield _draw_tile("loss", draw_figure(data, ("final_loss",), scales.format_number))
    yield _draw_tile(
        "steps",
        draw_figure(data, ("steps",), scales.format_whole),
        join_markup(draw_figure(data, ("samples",), scales.format_whole), " samples"),
    )
    yield _draw_tile(
        "a step",
        draw_sum(data, ("step_seconds",), scales.format_seconds),
        "mean over steps and workers",
    )
    yield _draw_tile(
        "samples a second",
        draw_figure(data, ("samples_per_second",), scales.format_whole),
        "inside steps",
    )
    yield _draw_tile("time", draw_figure(data, ("seconds",), scales.format_clock))
    if find_field(data, "workers") is not None:
        workers = join_markup(
            "on ",
            draw_figure(data, ("hosts",), scales.format_whole),
            f" host{'' if find_field(data, 'hosts') == 1 else 's'}",
        )
        yield _draw_tile("workers", draw_figure(data, ("workers",), scales.format_whole), workers)
    if find_field(data, "bytes_sent", "between"):
        yield _draw_tile(
            "between hosts",
            draw_figure(data, ("bytes_sent", "between"), scales.format_nbytes),
            "sent by all in a step",
        )
    count = find_field(data, "checkpoints", "count")
    if count:
        yield _draw_tile(
            "checkpoints", draw_figure(data, ("checkpoints", "count"), scales.format_whole)
        )
    events = [event for event in data["events"] if event["kind"] in ("lost", "came")]
    if events:
        yield _draw_tile("lost or come", format_count(len(events), "event"), "see below")


def _draw_tile(name: str, value: Child, note: Child = None) -> Markup:
    """Draw a figure with its name, and a note below it."""
    small = element("small", None, note) if note is not None else None
    return element(
        "div", {"class": "tile"}, element("dt", None, name), element("dd", None, value, small)
    )
