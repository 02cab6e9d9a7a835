"""The section on traffic: bytes by link, worker and axis, slow links, codecs and servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.bars import Bar, draw_bars
from paceline.observe.page.drawing.figures import draw_figure, draw_sum, find_field, read_number
from paceline.observe.page.drawing.html_tables import make_table
from paceline.observe.page.drawing.plots import Curve, Plot, draw_plot
from paceline.observe.page.markup import Markup, element, join_markup
from paceline.observe.page.subjects import step_axis, time_section
from paceline.trace import DESTINATIONS

SENT_WORDS: Mapping[str, str] = {"within": "within hosts", "between": "between hosts"}


def draw_traffic(data: Mapping[str, Any]) -> Markup | None:
    """Draw what one run has sent; None if it was a single worker, or nothing is known."""
    blocks = [
        *_draw_sent(data),
        *_draw_over_run(data),
        *_draw_by_worker(data),
        *_draw_axes(data),
        *_draw_links(data),
        *_list_texts(data),
    ]
    return join_markup(*blocks) if blocks else None


def _draw_sent(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the bytes of a step within and between hosts."""
    bytes_sent: Mapping[str, float] = find_field(data, "bytes_sent") or {}
    if not any(read_number(data, "bytes_sent", to) for to in DESTINATIONS if to in bytes_sent):
        return
    rows = [
        Bar(
            "a step",
            {to: read_number(data, "bytes_sent", to) for to in DESTINATIONS},
            draw_sum(data, ("bytes_sent",), scales.format_nbytes),
        )
    ]
    yield element("h3", None, "Sent by all workers together in a step")
    yield draw_bars("Bytes of a step", rows, SENT_WORDS)
    cells = (
        (SENT_WORDS[to], draw_figure(data, ("bytes_sent", to), scales.format_nbytes))
        for to in DESTINATIONS
    )
    yield make_table(("where", "bytes of a step"), cells)


def _draw_over_run(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the bytes of a step over the run, if they are known for each step."""
    course = data["course"]
    steps, counts = course["step"], course["count"]
    columns = {
        to: [sent / count for sent, count in zip(course["bytes_sent"][to], counts, strict=True)]
        for to in DESTINATIONS
    }
    tops = [max(column, default=0.0) for column in columns.values()]
    # A single stretch, or no bytes at all, makes no curve.
    if len(steps) < 2 or not any(tops):
        return
    # A kind of link without traffic has no curve.
    link_kinds = [to for to, top in zip(DESTINATIONS, tops, strict=True) if top > 0]
    curves = [
        Curve(SENT_WORDS[to], steps, columns[to], kind=kind) for kind, to in enumerate(link_kinds)
    ]
    y = scales.make_scale(0.0, 1.05 * max(tops), scales.format_nbytes, 4, zero=True)
    x = step_axis.make_step_axis(steps, many=True)
    yield element("h3", None, "Over the run: bytes of a step")
    yield draw_plot(
        Plot(
            "Bytes of a step, over steps",
            curves,
            x,
            y,
            "step",
            step_axis.make_marks(data),
            step_axis.make_step_clock(data),
            150,
        )
    )


def _draw_by_worker(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the bytes of a step that each worker sends."""
    members: Sequence[Mapping[str, Any]] = find_field(data, "members") or ()
    # Without members, the fields are those of ranks, which have no bytes of their own.
    order = [
        (label, path[1])
        for label, _, path in time_section.list_workers(data)
        if members and isinstance(path[1], int)
    ]
    rows = [
        Bar(
            label,
            {to: read_number(data, "members", at, "bytes_sent", to) for to in DESTINATIONS},
            draw_sum(data, ("members", at, "bytes_sent"), scales.format_nbytes),
        )
        for label, at in order[: time_section.MAX_BARS]
    ]
    if len(rows) > 1 and any(sum(row.sizes.values()) for row in rows):
        yield element("h3", None, "For each worker: bytes of a step")
        yield draw_bars("Bytes of a step", rows, SENT_WORDS)


def _draw_axes(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the bytes of a step along each axis of the mesh."""
    along: Mapping[str, Any] = find_field(data, "axes") or {}
    if not along:
        return
    rows = [
        Bar(
            axis,
            {to: read_number(data, "axes", axis, to) for to in DESTINATIONS},
            join_markup(
                draw_figure(data, ("axes", axis, "within"), scales.format_nbytes),
                " + ",
                draw_figure(data, ("axes", axis, "between"), scales.format_nbytes),
            ),
        )
        for axis in along
    ]
    yield element(
        "h3",
        None,
        "Along the axes of the mesh: bytes of all workers in a step, within and between hosts",
    )
    yield draw_bars("Bytes along an axis", rows, SENT_WORDS)
    cells = (
        (
            axis,
            draw_figure(data, ("axes", axis, "seconds"), scales.format_seconds),
            *(draw_figure(data, ("axes", axis, to), scales.format_nbytes) for to in DESTINATIONS),
        )
        for axis in along
    )
    yield make_table(("axis", "stood still in a step", "within hosts", "between hosts"), cells)


def _draw_links(data: Mapping[str, Any]) -> Iterator[Markup]:
    """Draw the rates of slow links beside the usual rates."""
    links: Sequence[Mapping[str, Any]] = find_field(data, "links") or ()
    if not links:
        return
    # One scale for slow and usual rates, so that they can be compared.
    largest_rate = max(
        [
            read_number(data, "links", at, field)
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
                {"between": read_number(data, "links", at, "rate")},
                draw_figure(data, ("links", at, "rate"), scales.format_rate),
                note,
            )
        )
        if link["usual"] is not None:
            usual = {"within": read_number(data, "links", at, "usual")}
            rows.append(
                Bar("others", usual, draw_figure(data, ("links", at, "usual"), scales.format_rate))
            )
    yield draw_bars(
        "Bytes a second", rows, {"within": "usual", "between": "slow"}, least=largest_rate
    )
    yield element("ul", None, (element("li", None, link["words"]) for link in links))


def _list_texts(data: Mapping[str, Any]) -> Iterator[Markup]:
    """List the verdicts on codecs and servers."""
    codecs: Sequence[Mapping[str, Any]] = find_field(data, "codecs") or ()
    if codecs:
        yield element("h3", None, "Codecs")
        yield element("ul", None, (element("li", None, codec["words"]) for codec in codecs))
    if data["served"]:
        yield element("h3", None, "Servers")
        yield element("pre", {"tabindex": 0}, data["served"])
