"""Workers of two hosts send each other messages; each leaves what it has sent, and what its
host's link has carried, in a file.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

import paceline as pl
from paceline.comm.pairs import connect_pairs
from tests.harness.every_strategy import leaving
from tests.harness.pair_traffic import converse

LANES = 3

with pl.start(seed=1, folder=sys.argv[1], name="test") as run:
    both = connect_pairs(run.group)
    converse(both, 100, 3)  # any shapes, lanes and orders, over the network and inside of hosts
    run.barrier()
    before, sent = leaving(), replace(both.traffic)
    x = torch.full((500_000,), float(run.rank))
    works = [
        both.send(to, lane, {"n": lane}, [x[lane:], x])
        for lane in range(LANES)
        for to in range(run.size)
    ]
    for lane in range(LANES):
        for source in range(run.size):
            one, other = both.receive(source, lane).wait().tensors
            assert torch.equal(other, torch.full((500_000,), float(source))) and torch.equal(
                one, other[lane:]
            )
    for work in works:
        work.wait()
    run.barrier()
    more = both.traffic - sent
    found = {
        "between": more.between,
        "within": more.within,
        "host": run.host,
        "left": leaving() - before,
    }
    (Path(sys.argv[1]) / f"{run.rank}.json").write_text(json.dumps(found))
    both.close()
