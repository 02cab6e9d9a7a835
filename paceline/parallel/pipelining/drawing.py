"""Draws pipelines as the papers do: a row for each rank, time from left to right, and each action
as wide as it takes long.

rank 0   F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
rank 1   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from paceline.formatting import counted
from paceline.parallel.pipelining.schedule import Action, Kind, PipelineSchedule
from paceline.parallel.pipelining.simulate import ActionSpan, PipelineTimeline

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
COLOURS: dict[Kind, str] = {
    "forward": "cyan",
    "backward": "green",
    "input": "green",
    "weight": "yellow",
}
NAMED = 8  # ranks whose memory is told one by one


def draw(timeline: PipelineTimeline, width: int) -> Text:
    """Draw a timeline in lines of at most `width` characters; what doesn't fit goes on below.

    Colours only repeat what letters say.
    """
    schedule = timeline.schedule
    margin = len(f"rank {schedule.ranks - 1}") + 3
    cell, scale = _scale(timeline)
    columns = round(timeline.makespan * scale)
    rows = [_row(schedule, spans, cell, scale, columns) for spans in timeline.rows]
    band = max(1, (width - margin) // cell) * cell
    bands = [row.divide(range(band, columns, band)) for row in rows]
    lines = [*map(Text, _head(schedule)), Text()]
    for number, parts in enumerate(zip(*bands, strict=True)):
        if columns > band:
            lines.append(Text(f"{'time':<{margin}}{number * band / scale:.4g}"))
        for rank, part in enumerate(parts):
            line = Text(f"{f'rank {rank}':<{margin}}") + part
            line.rstrip()
            lines.append(line)
    return Text("\n").join([*lines, Text(), Text(_sums(timeline))])


def compare(timelines: Iterable[PipelineTimeline]) -> Table:
    """Return a table of pipelines: the time that each takes, the bubble, what ranks keep, and
    how often they send.
    """
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
            _percent(timeline.bubble),
            f"{max(timeline.kept):.3g}",
            f"{len(timeline.transfers)}",
        )
        table.add_row(schedule.name, str(chunks), *cells)
    return table


def _head(schedule: PipelineSchedule) -> list[str]:
    """Say what is drawn, and how to read it."""
    chunks = schedule.stages // schedule.ranks
    number = schedule.micro_batches
    counts = [counted(schedule.ranks, "rank"), f"{number} micro-batch{'' if number == 1 else 'es'}"]
    each = f", {chunks} stages on each" if chunks > 1 else ""
    parts = ["F0: forward of micro-batch 0"]
    parts += (
        ["I0: gradients of its inputs", "W0: of parameters"]
        if schedule.split
        else ["B0: its backward"]
    )
    parts += (
        [
            "f, i, w: in the rank's second stage"
            if schedule.split
            else "f, b: in the rank's second stage"
        ]
        if chunks == 2
        else []
    )
    parts += ["F0a, F0b, ...: in the rank's first stage, second, ..."] if chunks > 2 else []
    return [f"{schedule.name}: {', '.join(counts)}{each}", "; ".join([*parts, ".: idle"])]


def _sums(timeline: PipelineTimeline) -> str:
    """Say what it takes, as a last line."""
    kept = [f"{number:.3g}" for number in timeline.kept]
    if len(set(kept)) == 1:
        each = f"{kept[0]} on each rank"
    elif len(kept) <= NAMED:
        each = f"{', '.join(kept)}, rank by rank"
    else:
        each = f"{min(timeline.kept):.3g} to {max(timeline.kept):.3g}"
    return (
        f"time {timeline.makespan:.4g}, bubble {_percent(timeline.bubble)}, micro-batches kept at "
        f"most: {each}"
    )


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _label(schedule: PipelineSchedule, action: Action) -> str:
    """Name an action: its letter, small in the second of two stages of a rank, and its
    micro-batch; of more stages, also which.
    """
    held = schedule.held(schedule.placed[action.stage])
    letter, chunk = LETTERS[action.kind], held.index(action.stage)
    if len(held) <= 2:
        return f"{letter.lower() if chunk else letter}{action.micro_batch}"
    return f"{letter}{action.micro_batch}{chr(ord('a') + chunk)}"


def _scale(timeline: PipelineTimeline) -> tuple[int, float]:
    """Return the characters of a unit, in which any label has room, and those of a second.

    A unit is the shortest action, unless that is far shorter than others. It is made a little wider
    where actions begin in between then.
    """
    spans = [span for row in timeline.rows for span in row]
    took = [span.end - span.start for span in spans]
    unit = max(min(took), median(took) / 4) or max(took) or 1.0
    least = max(len(_label(timeline.schedule, span.action)) for span in spans) + 1
    for cell in range(least, 2 * least + 1):
        ends = [span.end * cell / unit for span in spans]
        if all(abs(end - round(end)) < 1e-6 for end in ends):
            return cell, cell / unit
    return least + 1, (least + 1) / unit


def _row(
    schedule: PipelineSchedule, spans: Sequence[ActionSpan], cell: int, scale: float, columns: int
) -> Text:
    """Draw what one rank does, in `columns` characters."""
    idle = "." + " " * (cell - 1)
    row = Text()
    for span in spans:
        start, end = round(span.start * scale), round(span.end * scale)
        row.append(_idle(idle, len(row), start))
        row.append(
            _box(_label(schedule, span.action), end - start, cell), COLOURS[span.action.kind]
        )
    row.append(_idle(idle, len(row), columns))
    return row


def _idle(pattern: str, start: int, end: int) -> str:
    return (pattern * (end // len(pattern) + 1))[start:end]


def _box(label: str, width: int, cell: int) -> str:
    """Write a label into so many characters, with dashes as long as it lasts, and the letter
    alone where there is no room.
    """
    if width <= len(label):
        return f"{label[:1]:<{width}}"[:width]
    text = f"{label:<{cell}}" + ("-" * (cell - 1) + " ") * (width // cell)
    return f"{text[: width - 1]} "
