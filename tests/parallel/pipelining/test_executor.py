"""A schedule that is run on threads, with workers that are slow by turns, gives what one process
gives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group_protocol import Group
from paceline.comm.pairs import connect_pairs
from paceline.errors import PacelineError
from paceline.parallel.pipelining.executor import MicroBatch, PipelineExecutor
from paceline.parallel.pipelining.operations import OUTPUT
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.stage_messages import Values
from tests.harness.jobs import PATIENCE
from tests.harness.models import fill
from tests.harness.thread_groups import spawn

COUNT, ROWS = 6, 3


def linear(number: int) -> nn.Linear:
    made = nn.Linear(4, 4).double()
    fill(made, number)
    return made


class Layer:
    """A stage of one layer, which may be slow."""

    def __init__(self, number: int, last: int, seconds: float) -> None:
        self.layer, self._ends, self._seconds = linear(number), number == last, seconds

    def run_stage(self, values: Values) -> Values:
        time.sleep(self._seconds)
        out = torch.tanh(self.layer(values["x"]))
        return {OUTPUT: out} if self._ends else {"x": out}


class Passes:
    """Counts passes, and remembers which was the last of its parameters."""

    def __init__(self) -> None:
        self.lasts: list[bool] = []
        self.open = False

    def begin_pass(self, *, last: bool) -> None:
        assert not self.open
        self.open = True
        self.lasts.append(last)

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        assert self.open and parameters

    def end_pass(self) -> None:
        self.open = False


def inputs() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(9)
    return [torch.randn(ROWS, 4, generator=numbers, dtype=torch.float64) for _ in range(COUNT)]


def wanted(stages: int) -> tuple[list[Tensor], list[float]]:
    layers = [linear(number) for number in range(stages)]
    losses = []
    for x in inputs():
        for layer in layers:
            x = torch.tanh(layer(x))
        loss = x.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return [p.grad for layer in layers for p in layer.parameters() if p.grad is not None], losses


@contextlib.contextmanager
def executor(
    group: Group, schedule: Any, seconds: float = 0.0
) -> Iterator[tuple[PipelineExecutor, dict[int, Layer]]]:
    stages = {
        stage: Layer(stage, schedule.stages - 1, seconds)
        for stage in schedule.stages_of_rank(group.rank)
    }
    messages = connect_pairs(group)
    try:
        yield PipelineExecutor(stages, messages, group.rank), stages
    finally:
        group.barrier().wait()
        messages.close()


@pytest.mark.parametrize("slow", [None, 0, 1])
@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [
        ("gpipe", 3, None),
        ("1f1b", 3, None),
        ("interleaved", 2, 2),
        ("zero-bubble", 3, None),
        ("zbv", 2, None),
    ],
)
def test_gradients_and_losses_are_those_of_one_process(
    name: str, ranks: int, chunks: int | None, slow: int | None
) -> None:
    schedule = make_schedule(name, ranks, COUNT, chunks)
    grads, losses = wanted(schedule.stages)

    def body(group: Group) -> Any:
        batches = [MicroBatch({"x": x}, None, 1.0, ROWS) for x in inputs()]
        passes = Passes()
        with executor(group, schedule, 0.002 if group.rank == slow else 0.0) as (running, stages):
            for _ in range(2):  # the second as the first
                for stage in stages.values():
                    stage.layer.zero_grad()
                done = running.run_schedule(
                    schedule,
                    batches,
                    lambda out, batch: ((loss := out.square().sum()), float(loss.detach())),
                    passes,
                    where="step",
                )
            found = {
                stage: [p.grad for p in layer.layer.parameters()] for stage, layer in stages.items()
            }
        assert passes.lasts.count(True) == 2 * len(stages)
        return found, done.losses

    found: dict[int, list[Tensor]] = {}
    for mine, told in spawn(ranks, body):
        found |= mine
        assert not told or [told[number] for number in range(COUNT)] == pytest.approx(
            losses, abs=1e-12
        )
    got = [grad for stage in range(schedule.stages) for grad in found[stage]]
    assert all(
        torch.allclose(one, two, atol=1e-12, rtol=0) for one, two in zip(got, grads, strict=True)
    )


def test_a_stage_that_never_sends_is_named() -> None:
    schedule, over = make_schedule("1f1b", 2, 2), threading.Event()

    def body(group: Group) -> str:
        messages: Any = connect_pairs(group)
        if group.rank == 0:
            assert over.wait(PATIENCE)
            return ""
        messages._terms = messages._terms._replace(deadline=0.5)
        running = PipelineExecutor({1: Layer(1, 1, 0.0)}, messages, 1)
        batches = [MicroBatch({}, None, 1.0, ROWS)] * 2
        with pytest.raises(PacelineError) as caught:
            running.run_schedule(
                schedule, batches, lambda out, batch: (out.sum(), 0.0), Passes(), where="run.step 7"
            )
        over.set()
        return str(caught.value)

    said = spawn(2, body)[1]
    assert "what stage 0 gives stage 1 for micro-batch 0 in run.step 7" in said
