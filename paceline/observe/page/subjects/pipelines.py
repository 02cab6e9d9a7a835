"""The section on pipelines: the schedule of each with the times measured, its bubble, and what
its stages take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import figure, find
from paceline.observe.page.drawing.html_tables import table
from paceline.observe.page.drawing.plots import across
from paceline.observe.page.markup import Markup, element, join

THICK: Final = 22  # pixels of a worker's row
# colours of `bars`
ACTIONS: Final = {"forward": "k0", "backward": "k1", "input": "k1", "weight": "k3"}


def section(data: Mapping[str, Any]) -> Markup | None:
    """Draw the pipelines of one run; None without any."""
    if not data["pipelines"]:
        return None
    return join(*(part for at in range(len(data["pipelines"])) for part in _pipeline(data, at)))


def _pipeline(data: Mapping[str, Any], at: int) -> Iterator[Markup]:
    found = data["pipelines"][at]
    measured, predicted = (
        figure(data, ("pipelines", at, "bubble", which), scales.percent)
        for which in ("measured", "predicted")
    )
    took = figure(data, ("pipelines", at, "step_seconds"), scales.seconds)
    then = figure(data, ("pipelines", at, "predicted_step_seconds"), scales.seconds)
    words = (
        f"{found['schedule']}, {found['micro_batches']} micro-batches: a step took ",
        took,
        " with a bubble of ",
        measured,
    )
    yield element(
        "p",
        None,
        *words,
        "; by its schedule and the times of its actions it would be ",
        then,
        " and ",
        predicted,
        ".",
    )
    if found["rows"]:
        yield _drawing(data, found)
    yield table(
        (
            "stage",
            "on",
            "layers",
            "forward",
            "backward",
            "waits in a step",
            "keeps of a micro-batch",
        ),
        _stages(data, at),
    )


def _drawing(data: Mapping[str, Any], found: Mapping[str, Any]) -> Markup:
    """Draw a row of actions for each worker."""
    end = found["seconds"]
    rows = list[Markup]()
    for rank, spans in zip(found["ranks"], found["rows"], strict=True):
        name = data["ranks"][rank] if rank < len(data["ranks"]) else f"rank {rank}"
        drawn = (_action(span, end) for span in spans)
        title = element("title", None, f"{name}: its {len(spans)} actions in a step")
        row = element(
            "svg",
            {"class": "plane", "width": "100%", "height": THICK + 3, "role": "img"},
            title,
            *drawn,
        )
        rows += [element("span", {"class": "label"}, name), row]
    axis = scales.scale(0.0, end, scales.seconds, 4)
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *across(axis, 14),
    )
    kinds = dict.fromkeys(span[0] for row in found["rows"] for span in row)
    legend = (
        element("span", {"class": "key"}, _key(kind), kind) for kind in ACTIONS if kind in kinds
    )
    schedule = element("div", {"class": "rows"}, *rows, element("span", {"class": "label"}), below)
    return element("figure", None, element("figcaption", {"class": "legend"}, *legend), schedule)


def _action(span: Sequence[Any], end: float) -> Markup:
    kind, stage, micro_batch, start, stop = span
    x, width = f"{100 * start / end:.2f}%", f"{100 * (stop - start) / end:.2f}%"
    said = (
        f"{kind} of micro-batch {micro_batch} in stage {stage}: {scales.seconds(start)} to "
        f"{scales.seconds(stop)}"
    )
    box: dict[str, str | float | None] = {"x": x, "width": width, "height": THICK}
    inside = element(
        "svg",
        {**box, "class": "clipped"},
        element("text", {"class": "inside", "x": 3, "y": 15}, str(micro_batch)),
    )
    title = element("title", None, said)
    return join(element("rect", {**box, "class": f"action {ACTIONS[kind]}"}, title), inside)


def _key(kind: str) -> Markup:
    box = element("rect", {"class": f"action {ACTIONS[kind]}", "width": 14, "height": 12})
    return element(
        "svg", {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"}, box
    )


def _stages(data: Mapping[str, Any], at: int) -> Iterator[Sequence[Any]]:
    stages: Sequence[Mapping[str, Any]] = find(data, "pipelines", at, "stages") or ()
    for number, stage in enumerate(stages):
        path = ("pipelines", at, "stages", number)
        layers, rank = stage["layers"], stage["rank"]
        named = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        backward = [
            figure(data, (*path, "seconds", kind), scales.seconds)
            for kind in ("backward", "input", "weight")
            if kind in stage["seconds"]
        ]
        cells = (
            [backward[0], *(part for each in backward[1:] for part in (" + ", each))]
            if backward
            else [""]
        )
        name = data["ranks"][rank] if rank < len(data["ranks"]) else f"rank {rank}"
        yield (
            str(number),
            name,
            named,
            figure(data, (*path, "seconds", "forward"), scales.seconds),
            join(*cells),
            figure(data, (*path, "waited"), scales.seconds),
            figure(data, (*path, "kept"), scales.nbytes),
        )
