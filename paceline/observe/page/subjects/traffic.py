"""The section on traffic: bytes within and between hosts, over the run and by axis of the mesh,
links that became slow, codecs, servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, bars
from paceline.observe.page.drawing.figures import figure, find, number, summed
from paceline.observe.page.drawing.html_tables import table
from paceline.observe.page.drawing.plots import Curve, Plot, draw
from paceline.observe.page.markup import Markup, element, join
from paceline.observe.page.subjects import axes, time
from paceline.trace import SENT

WORDS: Mapping[str, str] = {"within": "within hosts", "between": "between hosts"}


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw what one run has sent; None where it was one worker by itself, or nothing is known."""
    parts = [
        *_sent(data),
        *_over(data),
        *_by_worker(data),
        *_axes(data),
        *_links(data),
        *_texts(data),
    ]
    return join(*parts) if parts else None


def _sent(data: Mapping[str, Any]) -> Iterator[Markup]:
    found: Mapping[str, float] = find(data, "bytes_sent") or {}
    if not any(number(data, "bytes_sent", to) for to in SENT if to in found):
        return
    rows = [
        Bar(
            "a step",
            {to: number(data, "bytes_sent", to) for to in SENT},
            summed(data, ("bytes_sent",), scales.nbytes),
        )
    ]
    yield element("h3", None, "Sent by all workers together in a step")
    yield bars("Bytes of a step", rows, WORDS)
    cells = ((WORDS[to], figure(data, ("bytes_sent", to), scales.nbytes)) for to in SENT)
    yield table(("where", "bytes of a step"), cells)


def _over(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the bytes of a step over the run, where they are known and change."""
    course = data["course"]
    steps, counts = course["step"], course["count"]
    columns = {
        to: [sent / count for sent, count in zip(course["bytes_sent"][to], counts, strict=True)]
        for to in SENT
    }
    tops = [max(column, default=0.0) for column in columns.values()]
    if len(steps) < 2 or not any(tops):
        return
    shown = [to for to, top in zip(SENT, tops, strict=True) if top > 0]
    curves = [Curve(WORDS[to], steps, columns[to], kind=kind) for kind, to in enumerate(shown)]
    y = scales.scale(0.0, 1.05 * max(tops), scales.nbytes, 4, zero=True)
    x = axes.of_steps(steps, many=True)
    yield element("h3", None, "Over the run: bytes of a step")
    yield draw(
        Plot(
            "Bytes of a step, over steps",
            curves,
            x,
            y,
            "step",
            axes.marks(data),
            axes.clock(data),
            150,
        )
    )


def _by_worker(data: Mapping[str, Any]) -> Iterator[Markup]:
    members: Sequence[Mapping[str, Any]] = find(data, "members") or ()
    order = [
        (label, path[1])
        for label, _, path in time.named(data)
        if members and isinstance(path[1], int)
    ]
    rows = [
        Bar(
            label,
            {to: number(data, "members", at, "bytes_sent", to) for to in SENT},
            summed(data, ("members", at, "bytes_sent"), scales.nbytes),
        )
        for label, at in order[: time.MOST]
    ]
    if len(rows) > 1 and any(sum(row.sizes.values()) for row in rows):
        yield element("h3", None, "For each worker: bytes of a step")
        yield bars("Bytes of a step", rows, WORDS)


def _axes(data: Mapping[str, Any]) -> Iterator[Markup]:
    along: Mapping[str, Any] = find(data, "axes") or {}
    if not along:
        return
    rows = [
        Bar(
            axis,
            {to: number(data, "axes", axis, to) for to in SENT},
            join(
                figure(data, ("axes", axis, "within"), scales.nbytes),
                " + ",
                figure(data, ("axes", axis, "between"), scales.nbytes),
            ),
        )
        for axis in along
    ]
    yield element(
        "h3",
        None,
        "Along the axes of the mesh: bytes of all workers in a step, within and between hosts",
    )
    yield bars("Bytes along an axis", rows, WORDS)
    cells = (
        (
            axis,
            figure(data, ("axes", axis, "seconds"), scales.seconds),
            *(figure(data, ("axes", axis, to), scales.nbytes) for to in SENT),
        )
        for axis in along
    )
    yield table(("axis", "stood still in a step", "within hosts", "between hosts"), cells)


def _links(data: Mapping[str, Any]) -> Iterator[Markup]:
    links: Sequence[Mapping[str, Any]] = find(data, "links") or ()
    if not links:
        return
    most = max(
        [
            number(data, "links", at, field)
            for at in range(len(links))
            for field in ("rate", "usual")
        ]
    )
    yield element("h3", None, "Links that became slow")
    rows = list[Bar]()
    for at, link in enumerate(links):
        name = " and ".join(map(str, link["hosts"]))
        note = f"from step {link['step']:,} on"
        rows.append(
            Bar(
                name,
                {"between": number(data, "links", at, "rate")},
                figure(data, ("links", at, "rate"), scales.rate),
                note,
            )
        )
        if link["usual"] is not None:
            usual = {"within": number(data, "links", at, "usual")}
            rows.append(Bar("others", usual, figure(data, ("links", at, "usual"), scales.rate)))
    yield bars("Bytes a second", rows, {"within": "usual", "between": "slow"}, least=most)
    yield element("ul", None, (element("li", None, link["words"]) for link in links))


def _texts(data: Mapping[str, Any]) -> Iterator[Markup]:
    codecs: Sequence[Mapping[str, Any]] = find(data, "codecs") or ()
    if codecs:
        yield element("h3", None, "Codecs")
        yield element("ul", None, (element("li", None, codec["words"]) for codec in codecs))
    if data["served"]:
        yield element("h3", None, "Servers")
        yield element("pre", {"tabindex": 0}, data["served"])
