"""Options with a few choices: each is a `Literal`, and what is none of them is refused with all that there are, by the same `Literal`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline as pl
from paceline import lab
from paceline.cluster.launcher.request import LaunchRequest, check
from paceline.comm.schedule import SCHEDULES, ScheduleName
from paceline.errors import UsageError
from paceline.formatting import unknown
from paceline.parallel.pipelining.schedules import CHUNKED, FIXED
from paceline.parallel.pipelining.schedules import ScheduleName as PipelineScheduleName
from paceline.session.probe.dtypes import check as check_dtypes
from paceline.session.start import TRACES, TraceLength
from paceline.sync.gossip.graph import GRAPHS, Graph
from paceline.sync.routes import WAYS, Via
from tests.harness.runs import workers


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)


def prepared(**options: Any) -> None:
    """A run of two workers is asked to prepare a model, and a loader or a stream."""

    def body(run: pl.Run) -> None:
        stream = not {"readers", "shard"}.isdisjoint(options)
        data: Any = Stream() if stream else TensorDataset(torch.zeros(4, 2))
        run.prepare(nn.Linear(2, 2), DataLoader(data, batch_size=2), **options)

    workers(2, body)


def launched(**options: Any) -> None:
    check(LaunchRequest(script=__file__, **options))


def piped(**options: Any) -> None:
    """A pipeline of two stages is made, as its options are looked at when the model is there."""

    def body(run: pl.Run) -> None:
        run.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), cut=pl.pipeline("0, 1", **options))

    workers(2, body, mesh="stage=2")


def layered(**options: Any) -> None:
    def body(run: pl.Run) -> None:
        run.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), cut=pl.layers("0, 1", **options))

    workers(2, body, mesh="stage=2")


def saved(best: Any) -> None:
    workers(1, lambda run: run.save(metric=1.0, best=best))


ASKED: dict[str, Callable[..., object]] = {  # by what is called, with a wrong value of its option
    "AllReduce.codec": lambda codec: pl.AllReduce(codec=codec),
    "AllReduce.via": lambda via: pl.AllReduce(via=via),
    "Gossip.graph": lambda graph: pl.Gossip(graph=graph),
    "LocalSGD.momentum": lambda momentum: pl.LocalSGD(4, momentum=momentum),
    "ParameterServer.pull": lambda pull: pl.ParameterServer(pull=pull),
    "SparseEmbedding.mode": lambda mode: pl.SparseEmbedding(4, 2, mode),
    "int4.rounding": lambda rounding: pl.int4(rounding=rounding),
    "int8.rounding": lambda rounding: pl.int8(rounding=rounding),
    "topk.threshold": lambda threshold: pl.topk(0.1, threshold=threshold),
    "launch.backend": launched,
    "launch.straggler": launched,
    "layers.split": layered,
    "pipeline.schedule": piped,
    "pipeline.split": piped,
    "probe.dtypes": lambda dtypes: check_dtypes([dtypes]),
    "shard.params": lambda params: pl.shard(params=params),
    "shard.reduce": lambda reduce: pl.shard(reduce=reduce),
    "shard.zero": lambda zero: pl.shard(zero=zero),
    "start.compare": lambda compare: pl.start(compare=compare),
    "start.differing": lambda differing: pl.start(differing=differing),
    "start.on_nan": lambda on_nan: pl.start(on_nan=on_nan),
    "start.replicate": lambda replicate: pl.start(replicate=replicate),
    "start.straggler": lambda straggler: pl.start(straggler=straggler),
    "start.trace": lambda trace: pl.start(trace=trace),
    "tensor.layers": pl.tensor,
    "Run.prepare.accumulate": prepared,
    "Run.prepare.batchnorm": prepared,
    "Run.prepare.loss": prepared,
    "Run.prepare.readers": prepared,
    "Run.prepare.shard": prepared,
    "Run.prepare.shares": prepared,
    "Run.save.best": saved,
    "lab.cluster.placement": lambda placement: lab.cluster(hosts=1, placement=placement),
    "lab.Description.placement": lambda placement: lab.Description("mine", (lab.Host("a"),), (), placement),
    "lab.storm.kinds": lambda kinds: lab.storm(seed=1, kinds=(kinds,)),
}


def literals(hint: Any) -> list[Any]:
    """The words of all `Literal`s in an annotation."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    inside = get_args(hint) if get_origin(hint) in (Union, UnionType) or get_origin(hint) is not None else ()
    return [word for part in inside if part is not Ellipsis and not isinstance(part, list) for word in literals(part)]


def options() -> Iterator[tuple[str, list[Any]]]:
    """The options of everything public that have a `Literal`, each with its words."""
    homes = {name: getattr(pl, name) for name in pl.__all__ if callable(getattr(pl, name))}
    homes |= {f"lab.{name}": getattr(lab, name) for name in lab.__all__ if callable(getattr(lab, name))}
    homes |= {f"Run.{name}": each for name, each in vars(pl.Run).items() if callable(each) and not name.startswith("_")}
    for name, home in homes.items():
        if isinstance(home, type) and issubclass(home, Exception):
            continue
        plain = isinstance(home, type) and not dataclasses.is_dataclass(home)
        hints = get_type_hints(home.__init__ if plain else home, localns={"Asked": Any, "Strategy": Any})  # not imported by all at run time
        taken = inspect.signature(home).parameters
        for option in taken:
            if words := literals(hints.get(option, Any)):
                yield f"{name}.{option}", words


def test_every_option_with_choices_is_tried_here() -> None:
    assert {name for name, _ in options()} == set(ASKED)


@pytest.mark.parametrize("name", ASKED)
def test_a_wrong_value_is_refused_with_all_that_there_are(name: str) -> None:
    words = dict(options())[name]
    with pytest.raises(pl.UsageError) as refused:
        ASKED[name](**{name.rpartition(".")[2]: "somthing"})
    assert "somthing" in str(refused.value)
    assert [word for word in words if not re.search(rf"\b{word}\b", str(refused.value))] == []


def test_what_is_built_by_a_name_has_the_names_of_its_literal() -> None:
    assert get_args(ScheduleName) == tuple(SCHEDULES)
    assert get_args(Via) == tuple(WAYS)
    assert set(get_args(PipelineScheduleName)) == {*FIXED, *CHUNKED}
    assert get_args(Graph) == tuple(GRAPHS)
    assert get_args(TraceLength) == tuple(TRACES)


def test_what_is_no_choice_is_told_from_one() -> None:
    kind = int | Literal["last", "all"] | None
    assert unknown("trace", "last", kind) == ""
    assert unknown("trace", "lst", kind) == "trace='lst' is unknown; possible: all, last; did you mean last?"
    assert unknown("zero", True, Literal[1, 2]) == "zero=True is unknown; possible: 1, 2"
    assert issubclass(UsageError, ValueError)
