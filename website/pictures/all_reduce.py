"""All-reduces: a column for each rank, a row for each moment, and in between the moves of a round.

What a rank has of each chunk is a box, which fills up as the parts of more ranks come in, and is
green once it is the whole sum.
"""

from __future__ import annotations

from paceline.bench.schedule_pictures import parse_hosts
from paceline.comm.schedule import Schedule, build_schedule
from paceline.formatting import format_count
from website.pictures.svg import Drawing

SHOWN = {
    "direct": "4",
    "ring": "4",
    "owners": "4",
    "tree": "7",
    "halving-doubling": "4",
    "hierarchical": "2+2",
    "uneven": "3",
}
COLUMN, ROUND, BOX = 92.0, 62.0, 13.0  # pixels
LEFT = 84.0

# of each rank, and of each chunk: the ranks whose parts are in it
State = list[list[frozenset[int]]]


def pictures() -> dict[str, str]:
    """Draw each schedule by itself."""
    return {f"all-reduce-{name}.svg": picture(name, numbers) for name, numbers in SHOWN.items()}


def picture(name: str, numbers: str) -> str:
    """Draw one schedule; `numbers` are those that `paceline bench collectives --draw` takes."""
    placed = parse_hosts(numbers, numbers)
    schedule = build_schedule(name, placed)
    drawing = Drawing(
        f"{name}: {format_count(schedule.size, 'rank')}, "
        f"{format_count(len(schedule.rounds), 'round')}"
    )
    for rank in range(schedule.size):
        host = f" (host {placed[rank]})" if len(set(placed)) > 1 else ""
        drawing.say(_middle(rank), 16, f"rank {rank}{host}", "ink small", anchor="middle")
    state: State = [[frozenset((rank,))] * len(schedule.chunks) for rank in range(schedule.size)]
    for number, moves in enumerate(schedule.rounds):
        top = 26 + ROUND * number
        _boxes(drawing, schedule, state, top)
        drawing.say(4, top + BOX + ROUND / 2 - 4, f"round {number}", "soft")
        before = [list(row) for row in state]
        for move in moves:
            start = (_place(schedule, move.src, move.chunk), top + BOX + 2)
            end = (_place(schedule, move.dst, move.chunk), top + ROUND - 3)
            drawing.arrow(start, end, "to-blue" if move.add else "to-green")
            load = before[move.src][move.chunk]
            state[move.dst][move.chunk] = state[move.dst][move.chunk] | load if move.add else load
    _boxes(drawing, schedule, state, 26 + ROUND * len(schedule.rounds))
    return drawing.text()


def _middle(rank: int) -> float:
    return LEFT + COLUMN * (rank + 0.5)


def _place(schedule: Schedule, rank: int, chunk: int) -> float:
    """Return the middle of a chunk's box."""
    return _middle(rank) + (chunk - (len(schedule.chunks) - 1) / 2) * (BOX + 3)


def _boxes(drawing: Drawing, schedule: Schedule, state: State, top: float) -> None:
    """Draw what each rank has."""
    for rank, row in enumerate(state):
        for chunk, parts in enumerate(row):
            x = _place(schedule, rank, chunk) - BOX / 2
            drawing.box(x, top, BOX, BOX, "faint")
            filled = BOX * len(parts) / schedule.size
            drawing.box(
                x,
                top + BOX - filled,
                BOX,
                filled,
                "green" if len(parts) == schedule.size else "blue",
            )
