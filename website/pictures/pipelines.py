"""Pipelines: a row for each rank, time from left to right, and each action as wide as it takes
long.
"""

from __future__ import annotations

from paceline.parallel.pipelining.schedule import Kind
from paceline.parallel.pipelining.schedules import SCHEDULES, make_schedule
from paceline.parallel.pipelining.simulate import (
    PipelineTimeline,
    make_even_times,
    simulate_schedule,
)
from website.pictures.svg import Drawing

RANKS, MICRO_BATCHES = 4, 8
UNIT, ROW = 25.0, 20.0  # pixels of a forward, and of a row
LEFT = 56.0
LOOKS: dict[Kind, tuple[str, str]] = {  # the box, and the number in it
    "forward": ("blue", "on-dark"),
    "backward": ("orange", "on-light"),
    "input": ("orange", "on-light"),
    "weight": ("green", "on-dark"),
}
SAID: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input": "gradients of inputs",
    "weight": "gradients of parameters",
}


def picture() -> str:
    """Draw all schedules of as many ranks and micro-batches, one below the other."""
    drawing = Drawing(
        f"The schedules of pipelines, with {RANKS} ranks and {MICRO_BATCHES} micro-batches"
    )
    top = _legend(drawing)
    for name in SCHEDULES:
        schedule = make_schedule(name, RANKS, MICRO_BATCHES, None)
        top = _timeline(
            drawing, simulate_schedule(schedule, make_even_times(schedule, 1.0, 2.0, 0.0)), top
        )
    return drawing.text()


def _legend(drawing: Drawing) -> float:
    x = 4.0
    for kind in ("forward", "backward", "weight"):
        drawing.box(x, 4, 14, 14, LOOKS[kind][0])
        said = "backward, or only gradients of inputs" if kind == "backward" else SAID[kind]
        drawing.say(x + 20, 16, said, "soft")
        x += 40 + 6.6 * len(said)
    drawing.box(x, 4, 14, 14, "blue", part=0.55)
    drawing.say(x + 20, 16, "paler: second stage of a rank", "soft")
    return 46.0


def _timeline(drawing: Drawing, timeline: PipelineTimeline, top: float) -> float:
    """Draw one schedule; return where the next begins."""
    schedule = timeline.schedule
    drawing.say(4, top, schedule.name, "ink bold")
    kept = f"{max(timeline.kept_micro_batches):.3g}"
    drawing.say(
        112,
        top,
        f"bubble {100 * timeline.bubble:.1f} %, at most {kept} micro-batches kept on a rank",
        "soft",
    )
    for rank, spans in enumerate(timeline.rows):
        y = top + 10 + ROW * rank
        drawing.say(4, y + 14, f"rank {rank}", "soft small")
        drawing.box(LEFT, y, UNIT * timeline.makespan, ROW - 2, "faint")
        for span in spans:
            look, number = LOOKS[span.action.kind]
            x, width = LEFT + UNIT * span.start, UNIT * (span.end - span.start)
            second = schedule.stages_of_rank(rank).index(span.action.stage)
            drawing.box(x + 0.5, y, width - 1, ROW - 2, look, part=0.55 if second else 1.0)
            drawing.say(
                x + width / 2,
                y + 13,
                str(span.action.micro_batch),
                f"{'ink' if second else number} small",
                anchor="middle",
            )
    return top + 10 + ROW * RANKS + 30
