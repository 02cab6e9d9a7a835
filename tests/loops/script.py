"""Runs loops on real workers, one run after the other, and writes what each worker comes to.

script.py FOLDER NAME...      leaves FOLDER/RANK.pt: {name: what came of it}
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import paceline as pl
from tests.loops import data, evaluating, further, gradients, models, optimizers, several
from tests.loops.collection import LOOPS, flat

assert data and evaluating and further and gradients and models and optimizers and several
TENTHS = sorted(
    name for name, known in LOOPS.items() if not (known.threads or known.pending or known.refused)
)


def main() -> None:
    folder, found, rank = Path(sys.argv[1]), {}, 0
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        with pl.start(name=name, folder=str(folder / "runs"), seed=1) as run:
            found[name], rank = list(flat(LOOPS[name].body(run))), run.rank
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
