"""The section on pipelines: schedule with measured times, bubble, and stages of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from paceline.observe.page.drawing import scales
from paceline.observe.page.drawing.figures import draw_figure, find_field
from paceline.observe.page.drawing.html_tables import make_table
from paceline.observe.page.drawing.plots import draw_axis
from paceline.observe.page.markup import Markup, element, join_markup

ROW_HEIGHT: Final = 22  # pixels of a worker's row
# CSS class of each kind of action, with the same colours as bars.
ACTION_CLASSES: Final = {"forward": "k0", "backward": "k1", "input": "k1", "weight": "k3"}


def draw_pipelines(data: Mapping[str, Any]) -> Markup | None:
    """Draw the pipelines of one run; None without any."""
    if not data["pipelines"]:
        return None
    return join_markup(
        *(part for at in range(len(data["pipelines"])) for part in _draw_pipeline(data, at))
    )


def _draw_pipeline(data: Mapping[str, Any], at: int) -> Iterator[Markup]:
    """Draw one pipeline: a sentence, the schedule and its stages."""
    pipeline = data["pipelines"][at]
    measured, predicted = (
        draw_figure(data, ("pipelines", at, "bubble", which), scales.format_percent)
        for which in ("measured", "predicted")
    )
    step_seconds = draw_figure(data, ("pipelines", at, "step_seconds"), scales.format_seconds)
    predicted_seconds = draw_figure(
        data, ("pipelines", at, "predicted_step_seconds"), scales.format_seconds
    )
    words = (
        f"{pipeline['schedule']}, {pipeline['micro_batches']} micro-batches: a step took ",
        step_seconds,
        " with a bubble of ",
        measured,
    )
    prediction = "; by its schedule and the times of its actions it would be "
    yield element("p", None, *words, prediction, predicted_seconds, " and ", predicted, ".")
    if pipeline["rows"]:
        yield _draw_schedule(data, pipeline)
    yield make_table(
        (
            "stage",
            "on",
            "layers",
            "forward",
            "backward",
            "waits in a step",
            "keeps of a micro-batch",
        ),
        _stage_rows(data, at),
    )


def _draw_schedule(data: Mapping[str, Any], pipeline: Mapping[str, Any]) -> Markup:
    """Draw the actions of each worker in a row."""
    end = pipeline["seconds"]
    rows = list[Markup]()
    for rank, spans in zip(pipeline["ranks"], pipeline["rows"], strict=True):
        name = data["ranks"][rank] if rank < len(data["ranks"]) else f"rank {rank}"
        actions = (_draw_action(span, end) for span in spans)
        title = element("title", None, f"{name}: its {len(spans)} actions in a step")
        row = element(
            "svg",
            {"class": "plane", "width": "100%", "height": ROW_HEIGHT + 3, "role": "img"},
            title,
            *actions,
        )
        rows += [element("span", {"class": "label"}, name), row]
    axis = scales.make_scale(0.0, end, scales.format_seconds, 4)
    below = element(
        "svg",
        {"class": "plane", "width": "100%", "height": 20, "aria-hidden": "true"},
        *draw_axis(axis, 14),
    )
    # The legend has only the kinds that the schedule uses.
    kinds = dict.fromkeys(span[0] for row in pipeline["rows"] for span in row)
    legend = (
        element("span", {"class": "key"}, _draw_key(kind), kind)
        for kind in ACTION_CLASSES
        if kind in kinds
    )
    schedule = element("div", {"class": "rows"}, *rows, element("span", {"class": "label"}), below)
    return element("figure", None, element("figcaption", {"class": "legend"}, *legend), schedule)


def _draw_action(span: Sequence[Any], end: float) -> Markup:
    """Draw an action as a box with the number of its micro-batch."""
    kind, stage, micro_batch, start, stop = span
    x, width = f"{100 * start / end:.2f}%", f"{100 * (stop - start) / end:.2f}%"
    description = (
        f"{kind} of micro-batch {micro_batch} in stage {stage}: {scales.format_seconds(start)} to "
        f"{scales.format_seconds(stop)}"
    )
    geometry: dict[str, str | float | None] = {"x": x, "width": width, "height": ROW_HEIGHT}
    label = element(
        "svg",
        {**geometry, "class": "clipped"},
        element("text", {"class": "inside", "x": 3, "y": 15}, str(micro_batch)),
    )
    title = element("title", None, description)
    return join_markup(
        element("rect", {**geometry, "class": f"action {ACTION_CLASSES[kind]}"}, title), label
    )


def _draw_key(kind: str) -> Markup:
    """Draw a box for the legend."""
    box = element("rect", {"class": f"action {ACTION_CLASSES[kind]}", "width": 14, "height": 12})
    return element(
        "svg", {"class": "swatch", "width": 14, "height": 12, "aria-hidden": "true"}, box
    )


def _stage_rows(data: Mapping[str, Any], at: int) -> Iterator[Sequence[Any]]:
    """Yield the rows of the table of stages."""
    stages: Sequence[Mapping[str, Any]] = find_field(data, "pipelines", at, "stages") or ()
    for stage_index, stage in enumerate(stages):
        path = ("pipelines", at, "stages", stage_index)
        layers, rank = stage["layers"], stage["rank"]
        named = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        # A split backward has two parts, `input` and `weight`, which are shown as a sum.
        backward = [
            draw_figure(data, (*path, "seconds", kind), scales.format_seconds)
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
            str(stage_index),
            name,
            named,
            draw_figure(data, (*path, "seconds", "forward"), scales.format_seconds),
            join_markup(*cells),
            draw_figure(data, (*path, "waited"), scales.format_seconds),
            draw_figure(data, (*path, "kept"), scales.format_nbytes),
        )
