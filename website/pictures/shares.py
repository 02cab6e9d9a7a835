"""Shares of global batches: who takes which samples, equal or by speed, and what a worker does
that gets none.
"""

from __future__ import annotations

from paceline.data.shares import divide_equally, divide_proportionally, share_bounds
from website.pictures.svg import Drawing

LOOKS = (("blue", "on-dark"), ("orange", "on-light"), ("green", "on-dark"), ("purple", "on-dark"))
CELL, ROW = 26.0, 58.0
LEFT = 252.0


def picture() -> str:
    """Draw how three kinds of batches are dealt to four workers."""
    drawing = Drawing("How global batches are dealt to workers")
    rows = [
        ("a batch of 16, equal shares", divide_equally(16, 4)),
        ("a batch of 16, shares=[2, 1, 1, 1]", divide_proportionally(16, [2, 1, 1, 1])),
        ("the last batch has 3 samples", divide_equally(3, 4)),
    ]
    for number, (said, shares) in enumerate(rows):
        top = 8 + ROW * number
        drawing.say(4, top + 17, said, "ink")
        for worker, (start, stop) in enumerate(share_bounds(shares)):
            look, word = LOOKS[worker]
            for sample in range(start, stop):
                drawing.box(LEFT + CELL * sample, top, CELL - 2, 24, look)
                drawing.say(
                    LEFT + CELL * (sample + 0.5) - 1,
                    top + 16,
                    str(sample),
                    f"{word} small",
                    anchor="middle",
                )
            if stop - start > 1:  # else there is no room; the colours say it
                drawing.say(
                    LEFT + CELL * (start + stop) / 2 - 1,
                    top + 38,
                    f"worker {worker}",
                    "soft small",
                    anchor="middle",
                )
            elif start == stop:
                _ghost(drawing, LEFT + CELL * stop + 60, top, worker)
    return drawing.text()


def _ghost(drawing: Drawing, x: float, top: float, worker: int) -> None:
    look, _ = LOOKS[worker]
    drawing.box(x, top, CELL - 2, 24, look, part=0.3)
    drawing.say(x + CELL / 2 - 1, top + 16, "0", "ink small", anchor="middle")
    drawing.say(
        x + CELL + 8,
        top + 16,
        f"worker {worker} runs on a ghost: sample 0, with weight zero",
        "soft",
    )
