"""Turns of three workers on a parameter server, within different bounds of staleness: who waits,
and how far workers come in the same time.

Worker 2 has two slow turns. Whether a worker may begin a turn is decided by the clocks that servers
keep (`servers/process/worker_clocks.py`).
"""

from __future__ import annotations

from math import inf

from paceline.servers.process.worker_clocks import WorkerClocks
from website.pictures.svg import Drawing

WORKERS, SECONDS = 3, 12.0
SLOW = {(2, 1): 3.0, (2, 2): 3.0}  # (worker, turn): seconds; all others take one
BOUNDS = {
    0.0: "staleness=0: in lockstep",
    2.0: "staleness=2: at most two turns ahead",
    inf: "staleness=inf: nobody waits",
}
UNIT, ROW = 48.0, 22.0  # pixels of a second, and of a row
LEFT = 72.0

Turn = tuple[int, int, float, float]  # worker, turn, begin, end


def picture() -> str:
    """Draw the same workers within three bounds."""
    drawing = Drawing("Turns of three workers with different bounds of staleness")
    drawing.box(4, 4, 14, 14, "blue")
    drawing.say(24, 16, "a turn, with its number", "soft")
    drawing.box(190, 4, 14, 14, "orange")
    drawing.say(210, 16, "a slow turn", "soft")
    drawing.box(300, 4, 14, 14, "faint")
    drawing.say(320, 16, "waiting for the slowest", "soft")
    top = 48.0
    for bound, said in BOUNDS.items():
        found = turns(bound)
        done = sum(end <= SECONDS for *_, end in found)
        drawing.say(4, top, said, "ink bold")
        drawing.say(300, top, f"{done} turns in {SECONDS:.0f} s", "soft")
        _rows(drawing, found, top + 8)
        top += 8 + ROW * WORKERS + 32
    return drawing.text()


def turns(bound: float) -> list[Turn]:
    """Return the turns that begin within the time, by the servers' own rule: a worker begins one
    if it is at most `bound` turns ahead.
    """
    clocks = WorkerClocks(dict.fromkeys(range(WORKERS), 0))
    everyone, busy, found = range(WORKERS), dict[int, float](), list[Turn]()
    now = 0.0
    while now < SECONDS:
        for worker in everyone:
            if worker not in busy and clocks.compute_lead(worker, everyone) <= bound:
                turn = clocks.completed_turns[worker]
                busy[worker] = now + SLOW.get((worker, turn), 1.0)
                found.append((worker, turn, now, busy[worker]))
        now = min(busy.values())
        for worker in [worker for worker, end in busy.items() if end == now]:
            del busy[worker]
            clocks.complete_turn(worker, clocks.completed_turns[worker] + 1)
    return found


def _rows(drawing: Drawing, found: list[Turn], top: float) -> None:
    for worker in range(WORKERS):
        y = top + ROW * worker
        drawing.say(4, y + 14, f"worker {worker}", "soft small")
        drawing.box(LEFT, y, UNIT * SECONDS, ROW - 3, "faint")
        for _, turn, start, end in (each for each in found if each[0] == worker):
            width = UNIT * (min(end, SECONDS) - start)
            slow = (worker, turn) in SLOW
            drawing.box(
                LEFT + UNIT * start + 0.5, y, width - 1, ROW - 3, "orange" if slow else "blue"
            )
            drawing.say(
                LEFT + UNIT * start + width / 2,
                y + 14,
                str(turn),
                f"{'on-light' if slow else 'on-dark'} small",
                anchor="middle",
            )
