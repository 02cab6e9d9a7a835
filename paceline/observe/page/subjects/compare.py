"""The sections of a page that compares runs: their figures side by side, losses against steps,
seconds and bytes, and what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars
from paceline.observe.page.drawing.figures import figure, find, number, share, summed
from paceline.observe.page.drawing.html_tables import folded, table
from paceline.observe.page.drawing.plots import Curve, Numbers, Plot, draw, finite, smoothed, swatch
from paceline.observe.page.drawing.scales import Scale, Words
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects import setup
from paceline.observe.page.subjects.loss import SMOOTHED
from paceline.observe.page.subjects.overview import badge
from paceline.observe.page.subjects.time import WORDS as PART_WORDS
from paceline.observe.page.subjects.traffic import WORDS as SENT_WORDS
from paceline.trace import PARTS, SENT

Datas = Sequence[Mapping[str, Any]]


def overview(datas: Datas) -> Markup:
    """Write the figures of runs side by side, with the verdict on each."""
    head = ("run", "loss", "steps", "a step", "samples/s", "time", "compute", "sent in a step")
    rows = (
        (
            join(swatch(at), " ", label, *([] if data["ended"] else [" ", badge(data)])),
            figure(data, ("final_loss",), scales.plain),
            figure(data, ("steps",), scales.whole),
            summed(data, ("step_seconds",), scales.seconds),
            figure(data, ("samples_per_second",), scales.whole),
            figure(data, ("seconds",), scales.clock),
            share(data, ("step_seconds", "compute"), ("step_seconds",)),
            summed(data, ("bytes_sent",), scales.nbytes),
        )
        for at, (label, data) in enumerate(zip(labels(datas), datas, strict=True))
    )
    verdicts = (
        element("li", None, element("b", None, label), *_verdict(data))
        for label, data in zip(labels(datas), datas, strict=True)
    )
    title = element("h1", None, f"{len(datas)} runs compared")
    return join(
        title,
        table(head, _marked(rows), "The runs"),
        element("ul", {"class": "verdicts"}, verdicts),
    )


def _verdict(data: Mapping[str, Any]) -> Iterator[str]:
    yield ": " if data["ended"] else f" {data['standing']['words']}. "
    yield " ".join(data["verdict"])


def labels(datas: Datas) -> list[str]:
    """Return the names of runs, with a number where two have the same."""
    names = [str(data["name"]) for data in datas]
    return [
        name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, 1)
    ]


def _marked(rows: Iterator[tuple[Markup, ...]]) -> list[Sequence[Markup]]:
    """Say of each row of which run it is, for who compares its figures with that run's summary."""
    return [
        [element("span", {"data-run": at}, cell) for cell in row] for at, row in enumerate(rows)
    ]


def loss(datas: Datas) -> Markup | None:
    """Draw the loss of each run against steps, seconds and bytes; None where none was logged by
    one name in all of them.
    """
    if not (common := _common(datas)):
        return None
    name, *others = common
    between = any(number(data, "bytes_sent", "between") for data in datas)
    sent = "between" if between else "within"
    ways: Sequence[tuple[str, str, Words]] = (
        ("step", "steps", scales.short),
        ("time", "seconds", scales.clock),
        (sent, f"bytes that all workers have sent {SENT_WORDS[sent]}", scales.nbytes),
    )
    drawn = (_against(datas, name, field, title, words) for field, title, words in ways)
    more = (
        _against(datas, other, "step", "steps", scales.short, head=f"{other} against steps")
        for other in others
    )
    return join(
        element("p", None, f"{name}, the mean of each stretch of steps")
        if name != "loss"
        else None,
        *drawn,
        *more,
    )


def _common(datas: Datas) -> list[str]:
    """Return the names that all runs have logged, such as those of validation: loss first, where
    that is one.
    """
    first, *others = (list(data["values"]) for data in datas)
    return [name for name in first if all(name in names for names in others)]


def _against(
    datas: Datas, name: str, field: str, title: str, words: Words, *, head: str = ""
) -> Markup | None:
    curves = [
        Curve(label, data["values"][name][field], data["values"][name]["mean"], kind=at)
        for at, (label, data) in enumerate(zip(labels(datas), datas, strict=True))
        if data["values"][name][field]
    ]
    most = max(finite([curve.x for curve in curves]), default=0.0)
    if not most:
        return None
    x = scales.scale(0.0, most, words, 6, zero=True)
    y = _heights([curve.y for curve in curves])
    plot = Plot(f"{name} against {title}", curves, x, y, title if field == "step" else "")
    more = folded(SMOOTHED, draw(smoothed(plot))) if field == "step" else None
    return join(element("h3", None, head or f"against {title}"), draw(plot), more)


def _heights(columns: Sequence[Numbers]) -> Scale:
    every = finite(columns)
    return scales.scale(min(every, default=0.0), max(every, default=1.0), scales.plain)


def time(datas: Datas) -> Markup:
    """Draw the mean step of each run by parts."""
    return bars("A mean step", _bars(datas, "step_seconds", PARTS, scales.seconds), PART_WORDS)


def traffic(datas: Datas) -> Markup | None:
    """Draw the bytes of a step of each run; None where nothing was sent."""
    rows = _bars(datas, "bytes_sent", SENT, scales.nbytes)
    return (
        bars("Bytes of a step", rows, SENT_WORDS)
        if any(sum(row.sizes.values()) for row in rows)
        else None
    )


def _bars(
    datas: Datas, field: str, parts: Sequence[str], words: Callable[[float], str]
) -> list[Bar]:
    return [
        Bar(
            label,
            {part: number(data, field, part) for part in parts},
            element("span", {"data-run": at}, summed(data, (field,), words)),
        )
        for at, (label, data) in enumerate(zip(labels(datas), datas, strict=True))
    ]


def differences(datas: Datas) -> Markup:
    """Write a table of the settings that are not the same in all runs."""
    every = [setup.settings(data) for data in datas]
    names = dict.fromkeys(name for found in every for name in found)
    differ = [name for name in names if len({found.get(name) for found in every}) > 1]
    unknown = [
        label
        for label, data in zip(labels(datas), datas, strict=True)
        if find(data, "sync") is None
    ]
    hint = f"Settings of {', '.join(unknown)} are known once the run has ended." if unknown else ""
    note = element("p", {"class": "hint"}, hint) if hint else None
    if not differ:
        return join(element("p", None, "Their settings are the same."), note)
    rows = ((name, *(found.get(name, "–") for found in every)) for name in differ)
    return join(table(("setting", *labels(datas)), rows, "Settings that differ"), note)
