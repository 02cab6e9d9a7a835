"""What four workers hold of one model, with `shard(zero=1)`, 2 and 3: whole boxes on all
workers, or a piece on each.
"""

from __future__ import annotations

from website.pictures.svg import Drawing

WORKERS = 4
# bytes for each parameter of float32
KINDS = (("parameters", "blue", 4), ("gradients", "orange", 4), ("AdamW's memory", "green", 8))
CUT = {
    0: (),
    1: ("AdamW's memory",),
    2: ("gradients", "AdamW's memory"),
    3: ("parameters", "gradients", "AdamW's memory"),
}
BYTE, ROW = 9.0, 44.0  # pixels of a byte of each parameter, and of a row
LEFT = 176.0


def held(zero: int) -> dict[str, float]:
    """Return the bytes that a worker holds for each parameter, by kind; `zero` 0 is a model that
    isn't cut.
    """
    return {kind: size / WORKERS if kind in CUT[zero] else size for kind, _, size in KINDS}


def picture() -> str:
    """Draw what each worker holds, row by row."""
    drawing = Drawing("What each of four workers holds of a model")
    x = LEFT
    for kind, look, _ in KINDS:
        drawing.box(x, 4, 14, 14, look)
        drawing.say(x + 20, 16, kind, "soft")
        x += 44 + 7 * len(kind)
    for zero in CUT:
        top = 34 + ROW * zero
        drawing.say(4, top + 19, f"shard(zero={zero})" if zero else "each has all of it", "ink")
        x, sizes = LEFT, held(zero)
        for kind, look, _ in KINDS:
            drawing.box(x, top, BYTE * sizes[kind] - 1, 28, look)
            x += BYTE * sizes[kind]
        whole = sum(size for *_, size in KINDS)
        drawing.box(x, top, BYTE * (whole - sum(sizes.values())), 28, "faint")
        drawing.say(
            LEFT + BYTE * whole + 12,
            top + 19,
            f"{sum(sizes.values()):.3g} bytes for each parameter",
            "soft",
        )
    return drawing.text()
