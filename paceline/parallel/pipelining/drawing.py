"""Draws pipelines as papers do: a row for each rank, with time from left to right.

rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from paceline.formatting import format_count
from paceline.parallel.pipelining.schedule import LETTERS, Action, Kind, PipelineSchedule
from paceline.parallel.pipelining.simulate import ActionSpan, PipelineTimeline

COLOURS: dict[Kind, str] = {
    "forward": "cyan",
    "backward": "green",
    "input": "green",
    "weight": "yellow",
}
# Number of ranks up to which the memory of each is written.
LISTED_RANKS = 8


def draw_timeline(timeline: PipelineTimeline, width: int) -> Text:
    """Draw a timeline in lines of at most `width` characters.

    What doesn't fit goes on below. Each action is as wide as it takes time. Colours only repeat
    what the letters say.
    """
    schedule = timeline.schedule
    margin = len(f"rank {schedule.ranks - 1}") + 3
    cell, scale = _choose_scale(timeline)
    columns = round(timeline.makespan * scale)
    rows = [_draw_row(schedule, spans, cell, scale, columns) for spans in timeline.rows]
    # Long timelines are cut into bands, at multiples of a cell.
    band = max(1, (width - margin) // cell) * cell
    bands = [row.divide(range(band, columns, band)) for row in rows]
    lines = [*map(Text, _write_heading(schedule)), Text()]
    for band_index, parts in enumerate(zip(*bands, strict=True)):
        if columns > band:
            lines.append(Text(f"{'time':<{margin}}{band_index * band / scale:.4g}"))
        for rank, part in enumerate(parts):
            line = Text(f"{f'rank {rank}':<{margin}}") + part
            line.rstrip()
            lines.append(line)
    return Text("\n").join([*lines, Text(), Text(_write_summary(timeline))])


def tabulate_timelines(timelines: Iterable[PipelineTimeline]) -> Table:
    """Make a table of pipelines: time, bubble, activations kept, and number of messages of each."""
    table = Table(box=SIMPLE)
    for name in (
        "schedule",
        "stages of a rank",
        "time",
        "bubble",
        "kept at most (micro-batches)",
        "messages",
    ):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for timeline in timelines:
        schedule = timeline.schedule
        chunks = schedule.stages // schedule.ranks
        cells = (
            f"{timeline.makespan:.4g}",
            _format_percent(timeline.bubble),
            f"{max(timeline.kept_micro_batches):.3g}",
            f"{len(timeline.transfers)}",
        )
        table.add_row(schedule.name, str(chunks), *cells)
    return table


def _write_heading(schedule: PipelineSchedule) -> list[str]:
    """Write what is drawn, and how to read it."""
    chunks = schedule.stages // schedule.ranks
    count = schedule.micro_batches
    counts = [
        format_count(schedule.ranks, "rank"),
        f"{count} micro-batch{'' if count == 1 else 'es'}",
    ]
    each = f", {chunks} stages on each" if chunks > 1 else ""
    parts = ["F0: forward of micro-batch 0"]
    parts += (
        ["I0: gradients of its inputs", "W0: of parameters"]
        if schedule.splits_backward
        else ["B0: its backward"]
    )
    parts += (
        [
            "f, i, w: in the rank's second stage"
            if schedule.splits_backward
            else "f, b: in the rank's second stage"
        ]
        if chunks == 2
        else []
    )
    parts += ["F0a, F0b, ...: in the rank's first stage, second, ..."] if chunks > 2 else []
    return [f"{schedule.name}: {', '.join(counts)}{each}", "; ".join([*parts, ".: idle"])]


def _write_summary(timeline: PipelineTimeline) -> str:
    """Write the time, the bubble and the memory, as a last line."""
    numbers = [f"{count:.3g}" for count in timeline.kept_micro_batches]
    if len(set(numbers)) == 1:
        each = f"{numbers[0]} on each rank"
    elif len(numbers) <= LISTED_RANKS:
        each = f"{', '.join(numbers)}, rank by rank"
    else:
        each = f"{min(timeline.kept_micro_batches):.3g} to {max(timeline.kept_micro_batches):.3g}"
    return (
        f"time {timeline.makespan:.4g}, bubble {_format_percent(timeline.bubble)}, "
        f"micro-batches kept at most: {each}"
    )


def _format_percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _label_action(schedule: PipelineSchedule, action: Action) -> str:
    """Name an action by its letter and its micro-batch.

    The second of two stages of a rank has small letters. Of more stages, a letter at the end says
    which.
    """
    held = schedule.stages_of_rank(schedule.placed[action.stage])
    letter, chunk = LETTERS[action.kind], held.index(action.stage)
    if len(held) <= 2:
        return f"{letter.lower() if chunk else letter}{action.micro_batch}"
    return f"{letter}{action.micro_batch}{chr(ord('a') + chunk)}"


def _choose_scale(timeline: PipelineTimeline) -> tuple[int, float]:
    """Choose the characters for a unit of time, in which any label fits, and those for a second.

    The unit is the shortest action, unless it is far shorter than others. A unit gets a few more
    characters if actions then begin at whole characters.
    """
    # A fourth of the median keeps a few very short actions from stretching the drawing.
    spans = [span for row in timeline.rows for span in row]
    took = [span.end - span.start for span in spans]
    unit = max(min(took), median(took) / 4) or max(took) or 1.0
    least = max(len(_label_action(timeline.schedule, span.action)) for span in spans) + 1
    for cell in range(least, 2 * least + 1):
        ends = [span.end * cell / unit for span in spans]
        if all(abs(end - round(end)) < 1e-6 for end in ends):
            return cell, cell / unit
    return least + 1, (least + 1) / unit


def _draw_row(
    schedule: PipelineSchedule, spans: Sequence[ActionSpan], cell: int, scale: float, columns: int
) -> Text:
    """Draw what one rank does, in `columns` characters."""
    idle = "." + " " * (cell - 1)
    row = Text()
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        row.append(_draw_idle(idle, len(row), start))
        row.append(
            _draw_box(_label_action(schedule, span.action), end - start, cell),
            COLOURS[span.action.kind],
        )
    row.append(_draw_idle(idle, len(row), columns))
    return row


def _draw_idle(pattern: str, start: int, end: int) -> str:
    return (pattern * (end // len(pattern) + 1))[start:end]


def _draw_box(label: str, width: int, cell: int) -> str:
    """Write a label in `width` characters, with dashes to its end; or its letter alone."""
    if width <= len(label):
        return f"{label[:1]:<{width}}"[:width]
    text = f"{label:<{cell}}" + ("-" * (cell - 1) + " ") * (width // cell)
    return f"{text[: width - 1]} "
