"""What a worker measures of its stages: every action with its wait, layers, and the bytes that
stages keep.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from paceline.parallel.pipeline import pipeline
from paceline.parallel.pipelining.profiler import (
    ALL_MEASURED_UNTIL,
    KEPT_STEPS,
    MEASURED_EVERY,
    WARMUP_STEPS,
    PipelineProfiler,
)
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.session.run import Run
from paceline.trace import Span
from tests.harness.jobs import PATIENCE
from tests.harness.pipelines import LAYERS, gpt, next_tokens
from tests.harness.runs import workers


def profiled(
    run: Run, schedule: str = "1f1b", steps: int = 4, model: nn.Module | None = None
) -> tuple[dict[str, Any], list[Span]]:
    """What a worker has measured, and its trace, after these steps of 3 micro-batches."""
    model = gpt() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer, cut=pipeline(LAYERS, schedule=schedule, micro_batches=3))
    tokens = torch.arange(30).view(6, 5) % 11
    for _ in range(steps):
        run.step(model, tokens, tokens, loss=next_tokens)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            run.step(model, tokens, tokens, loss=next_tokens)  # an evaluation, which isn't measured
    return run._prepared.cuts.pipelines[0][
        1
    ].make_profile(), run._prepared.context.trace.list_spans()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_every_action_is_measured_with_its_wait(schedule: str) -> None:
    found = workers(2, lambda run: profiled(run, schedule), mesh="stage=2")
    plan = make_schedule(schedule, 2, 3, 2 if schedule == "interleaved" else None)
    steps = [dict((number, times) for number, _, times in facts["steps"]) for facts, _ in found]
    # the first two steps measure other things
    assert [list(each) for each in steps] == [[2, 3]] * 2
    for number in (2, 3):
        at = {
            action: time
            for row, each in zip(plan.rows, steps, strict=True)
            for action, time in zip(row, each[number], strict=True)
        }
        for row, each in zip(plan.rows, steps, strict=True):
            moments = [moment for time in each[number] for moment in time]
            assert len(each[number]) == len(row) and moments == sorted(moments)
        for action, (_, ready, _) in at.items():
            for need in plan.find_needed(action):
                assert at[need][1] <= ready, f"{action} had what it needs before {need} began"


def test_a_trace_has_actions_and_waits_apart_in_one_row() -> None:
    for _, spans in workers(2, profiled, mesh="stage=2"):
        row = [span for span in spans if span.kind == "stage"]
        names = {span.name for span in row}
        assert any(name in names for name in ("F2 of stage 0", "F2 of stage 1"))
        actions = [
            span
            for span in row
            if span.name.endswith(("of stage 0", "of stage 1")) and span.name[0] in "FB"
        ]
        ends = sorted((span.start, span.end) for span in row)
        assert all(one[1] <= two[0] for one, two in pairwise(ends))  # none inside of another
        assert len(actions) == 4 * (6 + 3)  # with backwards, and without


def test_a_wait_is_named_by_what_comes() -> None:
    gate = threading.Event()

    class Held(nn.Linear):
        """A layer that goes on once the other stage waits for it."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert gate.wait(PATIENCE)
            return super().forward(x)

    def body(run: Run) -> list[str]:
        model = nn.Sequential(Held(4, 4), nn.Linear(4, 4))
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pipeline("auto", micro_batches=2),
        )
        profiler, meter = (
            run._prepared.cuts.pipelines[0][1]._profiler,
            run._prepared.context.meters[-1],
        )
        if run.rank == 1:
            wait = profiler.wait_for_message

            def waiting(work: Any, what: str) -> Any:
                own = work.wait
                work.wait = lambda: (gate.set(), own())[1]
                return wait(work, what)

            profiler.wait_for_message = waiting  # type: ignore[method-assign]
        run.step(model, torch.ones(4, 4), torch.ones(4, 4), loss=nn.functional.mse_loss)
        assert meter.traffic.within > 0  # messages count along `stage`
        return [
            span.name for span in run._prepared.context.trace.list_spans() if span.kind == "stage"
        ]

    names = workers(2, body, mesh="stage=2")[1]
    assert names.index("what stage 0 gives stage 1 for micro-batch 0") < names.index(
        "F0 of stage 1"
    )


def test_layers_and_kept_bytes_are_measured_once() -> None:
    (first, _), (second, _) = workers(2, profiled, mesh="stage=2")
    assert set(first["layer_seconds"]) | set(second["layer_seconds"]) == set(
        range(len(first["layers"]))
    )
    assert all(
        seconds > 0 for each in (first, second) for seconds in each["layer_seconds"].values()
    )
    assert set(first["kept"]) == {0} and set(second["kept"]) == {1}


def test_what_a_stage_keeps_is_counted_without_parameters() -> None:
    def body(run: Run) -> dict[int, int]:
        model = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh()).double()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pipeline("0, 1, 2, 3", split=[2, 2], micro_batches=2),
        )
        run.step(
            model,
            torch.ones(8, 50).double(),
            torch.ones(8, 50).double(),
            loss=nn.functional.mse_loss,
        )
        kept: dict[int, int] = run._prepared.cuts.pipelines[0][1].make_profile()["kept"]
        return kept

    rows = 4 * 50 * 8
    first, second = workers(2, body, mesh="stage=2")
    # what comes in, and what tanh gives; no weights of 20,000 bytes
    assert first == {0: 2 * rows} and second == {1: 2 * rows}


def test_the_last_steps_are_kept() -> None:
    profiler = PipelineProfiler(None, lambda what, began, ended: None)  # type: ignore[arg-type]
    for _ in range(MEASURED_EVERY * (KEPT_STEPS + 5)):
        with profiler.measure_step(4, train=True):
            pass
        with profiler.measure_step(4, train=False):
            pass
    numbers = [number for number, _, _ in profiler.steps]
    assert (
        len(numbers) == KEPT_STEPS
        and numbers[-1] == MEASURED_EVERY * (KEPT_STEPS + 4)
        and numbers[1] - numbers[0] == MEASURED_EVERY
    )

    fresh = PipelineProfiler(None, lambda what, began, ended: None)  # type: ignore[arg-type]
    for _ in range(ALL_MEASURED_UNTIL):
        with fresh.measure_step(4, train=True):
            pass
    assert [number for number, _, _ in fresh.steps] == list(range(WARMUP_STEPS, ALL_MEASURED_UNTIL))
