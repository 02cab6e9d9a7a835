"""Mistakes that a checker finds before anything runs: the comment of each line is what mypy says
there. Nobody runs it.
"""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

import paceline as pl
from paceline import lab


def scale(x: float, factor: int = 2) -> float:
    return x * factor


def mistakes(run: pl.Run, model: nn.Module, optimizer: SGD) -> None:
    # No overload variant of "prepare" of "Run" matches argument type "list[object]"
    run.prepare([model, optimizer])
    run.prepare(model, 3)  # No overload variant of "prepare" of "Run" matches argument types
    # Unexpected keyword argument "batchnormm" for overloaded function "prepare" of "Run"
    run.prepare(model, batchnormm="sync")
    # No overload variant of "prepare" of "Run" matches argument types
    run.prepare(model, batchnorm="locl")
    swapped: SGD = run.prepare(model, optimizer)[0]  # Incompatible types in assignment
    print(run.turn)  # "Run" has no attribute "turn"
    run.save(metric=1.0, best="most")  # expected "Literal['min', 'max'] | None"
    run.mean("half")  # No overload variant of "mean" of "Run" matches argument type "str"
    pl.start(trace="some")  # expected "Literal['last', 'all', 'off']"
    pl.start(straggler="evit")  # expected "Literal['warn', 'rebalance', 'drop', 'evict'] | None"
    # has incompatible type "Literal['rnig']"; expected "Literal['auto', 'native'
    pl.AllReduce(via="rnig")
    pl.Gossip(graph="star")  # expected "Literal['ring', 'exponential', 'matching', 'full'] | tuple
    pl.LocalSGD(8, momentum="lost")  # expected "Literal['kept', 'averaged']"
    # expected "Literal['gpipe', '1f1b', 'interleaved', 'zero-bubble', 'zbv']"
    pl.pipeline(schedule="2f2b")
    pl.shard(zero=4)  # expected "Literal[1, 2, 3]"
    pl.int8(rounding="up")  # expected "Literal['nearest', 'stochastic']"
    pl.launch(scale, "wide")  # Argument 1 to "launch" has incompatible type
    pl.launch(scale)  # Argument 1 to "launch" has incompatible type
    pl.launch(scale, 1.0, backend="nccl")  # expected "Literal['paceline'] | None"
    pl.probe(run, dtypes=["int3"])  # List item 0 has incompatible type
    # No overload variant of "load" matches argument types "str", "str"
    pl.load("runs/circle", "model")
    lab.cluster(placement="spread")  # expected "Literal['block', 'round-robin'] | None"
    pl.begin()  # Module has no attribute "begin"
    print(swapped)
