"""Profiles of pipelines: put together from what workers have measured, on one clock, and
simulated with the medians.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.parallel.pipeline import pipeline
from paceline.record.pipeline_profile import PipelineProfile, combine_workers
from paceline.record.timeline import ClockOffset
from paceline.session.run import Run
from tests.harness.pipeline_profiles import measured
from tests.harness.runs import Numbered, workers


@pytest.mark.parametrize(
    ("name", "ranks", "bubble"),
    [
        ("gpipe", 4, 3 / 11),
        ("1f1b", 4, 3 / 11),
        ("zero-bubble", 4, 3 / 27),
        ("interleaved", 2, 1 / 17),
        ("zbv", 2, 1 / 49),
    ],
)
def test_the_bubble_is_that_of_the_paper_on_clocks_that_differ(
    name: str, ranks: int, bubble: float
) -> None:
    ahead = [0, 10**9, -(10**9), 7][:ranks]
    found = combine_workers(
        measured(name, [0.01] * 4, ranks=ranks, ahead=ahead),
        range(ranks),
        [ClockOffset(each) for each in ahead],
    )
    assert found is not None
    assert found.bubble == pytest.approx(bubble, abs=1e-6)
    assert found.simulated_timeline.bubble == pytest.approx(bubble, abs=1e-6)
    assert found.simulated_timeline.makespan == pytest.approx(found.step_seconds)
    assert found.steps == 3


def test_the_medians_are_told_from_waits_and_outliers() -> None:
    told = measured("1f1b", [0.01, 0.02], transfer=0.003)
    slow = [[began, ready, ended + 10**9] for began, ready, ended in told[0]["steps"][0][2]]
    told[0]["steps"][0][2] = slow
    found = combine_workers(told, (4, 6), [ClockOffset()] * 2)
    assert found is not None
    assert [stage.seconds for stage in found.stages] == [
        {"forward": 0.01, "backward": 0.02},
        {"forward": 0.02, "backward": 0.04},
    ]
    assert [stage.rank for stage in found.stages] == [4, 6]
    assert found.sends == (pytest.approx(0.003),) and found.returns == (pytest.approx(0.003),)
    # for the first micro-batch; then it is the slower one
    assert found.stages[1].waited == pytest.approx(0.013)
    assert found.stages[0].waited > 8 * 0.02


def test_steps_of_another_number_of_micro_batches_are_left_out() -> None:
    told = measured("1f1b", [0.01, 0.01])
    for worker, last in zip(
        told, measured("1f1b", [1.0, 1.0], micro_batches=3, steps=1), strict=True
    ):
        worker["steps"].append([3, *last["steps"][0][1:]])
    found = combine_workers(told, (0, 1), [ClockOffset()] * 2)
    assert found is not None
    assert (found.micro_batches, found.steps, found.stages[0].seconds["forward"]) == (8, 3, 0.01)
    assert (
        combine_workers([{**worker, "steps": []} for worker in told], (0, 1), [ClockOffset()] * 2)
        is None
    )


def test_a_profile_is_read_as_it_was_written() -> None:
    found = combine_workers(
        measured("zbv", [0.01, 0.02, 0.01, 0.01], ranks=2, layers=[2, 3, 1, 1]),
        (0, 1),
        [ClockOffset()] * 2,
    )
    assert found is not None
    written = found.to_fields()
    assert written["bubble"]["predicted"] == found.simulated_timeline.bubble
    # each keeps 2 micro-batches of both stages, of 100 bytes each
    assert written["kept_at_most"] == [400.0, 400.0]
    assert PipelineProfile.from_fields(json.loads(json.dumps(written))) == found


def test_layers_have_their_parts_of_a_stage() -> None:
    told = measured(
        "1f1b", [0.01, 0.02], layers=[2, 1], layer_seconds=[0.3, 0.1, 1.0], transfer=0.001
    )
    found = combine_workers(told, (0, 1), [ClockOffset()] * 2)
    assert found is not None
    ahead, back = (
        [cost.forward_seconds for cost in found.layer_costs],
        [cost.backward_seconds for cost in found.layer_costs],
    )
    assert ahead == pytest.approx([0.0075, 0.0025, 0.02]) and back == pytest.approx(
        [0.015, 0.005, 0.04]
    )
    assert found.make_split_problem(found.schedule_plan).simulate_split(
        found.layer_counts
    ).makespan == pytest.approx(found.simulated_timeline.makespan)


@pytest.mark.parametrize(("mesh", "count"), [("stage=2", 2), ("data=2, stage=2", 4)])
def test_a_run_s_summary_has_its_pipelines(mesh: str, count: int) -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cut = pipeline("auto", split=[3, 1], micro_batches=4)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(Numbered(44), batch_size=8), cut=cut
        )
        for x, y in loader:
            run.step(model, x, y, loss=nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        workers(count, body, mesh=mesh, folder=Path(folder))
        fields: dict[str, Any] = json.loads((Path(folder) / "test" / "summary.json").read_text())
        trace = json.loads((Path(folder) / "test" / "trace.json").read_text())
    found = [PipelineProfile.from_fields(each) for each in fields["pipelines"]]
    assert [profile.ranks for profile in found] == ([(0, 1)] if count == 2 else [(0, 1), (2, 3)])
    for profile in found:
        assert (profile.layer_counts, profile.micro_batches) == ([3, 1], 4)
        assert all(
            set(stage.seconds) == {"forward", "backward"} and stage.kept > 0
            for stage in profile.stages
        )
        assert 0 < profile.bubble < 1 and 0 < profile.simulated_timeline.bubble < 1
        assert profile.step_seconds < fields["seconds"]
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "stage"}
    assert {"F0 of stage 0", "B3 of stage 1"} <= names
    assert fields["axes"]["stage"]["within"] > 0
