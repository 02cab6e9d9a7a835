"""`codec="auto"`: when it switches, that all switch at once, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.codec.auto import auto
from paceline.codec.codec import error_feedback, gathered
from paceline.codec.dense import half, int8
from paceline.codec.sparse import topk
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.notation import format_notation, parse_notation
from paceline.session.run import Run
from paceline.sync import compressed
from paceline.sync.allreduce import AllReduce
from paceline.sync.codec_auto import (
    MEASURED_STEPS,
    SKIPPED_STEPS,
    CodecTrial,
    ExactSteps,
    predict_step_seconds,
    try_codec,
)
from paceline.sync.codec_cost import ExactRate
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.compressed_training import exchange, steps, train
from tests.harness.runs import workers
from tests.harness.thread_groups import spawn

# timed steps before it; the two before those have no time, or no buckets yet
CHOICE = SKIPPED_STEPS + MEASURED_STEPS


def record(step: float, shown: float, ready: list[tuple[int, float]]) -> ExactSteps:
    found = ExactSteps()
    found.measured_seconds, found.waited_seconds, found.departures = (
        [step] * CHOICE,
        [shown] * CHOICE,
        [ready] * CHOICE,
    )
    return found


def test_a_prediction_is_made_of_the_link_and_of_the_coding() -> None:
    rate = ExactRate(latency=0.01, per_byte=1e-6, sent=1.0)
    trial = CodecTrial(numel=1000, before=0.02, after=0.01, sent=1000, stages=1)
    exact = record(0.5, 0.3, [(0, 0.0), (1, 0.0)])
    # 1000 and 2000 elements: coded after 20 and 60 ms, gone after 20 + 11 and 60 + 12 ms, there 20
    # ms after the second
    assert predict_step_seconds(exact, trial, [1000, 2000], rate) == pytest.approx(
        0.5 - 0.3 + 0.02 + 0.04 + 0.012 + 0.02
    )
    # all of the link is hidden, but coding takes the processor from the model
    early = record(0.5, 0.3, [(0, 1.0), (1, 1.0)])
    assert predict_step_seconds(early, trial, [1000, 2000], rate) == pytest.approx(0.5 - 0.3 + 0.09)


def test_an_attempt_tells_bytes_and_stages() -> None:
    def work(group: Group) -> list[CodecTrial]:
        flat = torch.randn(4096, generator=torch.Generator().manual_seed(group.rank))
        return [
            try_codec(codec, flat, [flat.shape], group)
            for codec in (gathered(half()), error_feedback(gathered(topk(0.01))))
        ]

    for rank, (halves, few) in enumerate(spawn(3, work)):
        assert halves.stages == few.stages == 1, rank
        assert halves.sent == 2 * 2 * 4096 and few.sent == 2 * 8 * 41
        assert halves.before > 0 and halves.after > 0


def taken(run: Run) -> list[str]:
    return [repr(codec) for codec in exchange(run)._coded._codecs]  # type: ignore[union-attr]


@pytest.mark.parametrize("hosts", [(), (0, 0, 1)])
def test_all_switch_in_the_same_step_and_stay_equal(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(
        compressed,
        "predict_step_seconds",
        lambda record, trial, sizes, rate: record.step_seconds / (trial.sent and 5e3 / trial.sent),
    )
    said: list[str] = []
    seen: list[list[Tensor]] = [[] for _ in range(3)]
    plain: list[list[Tensor]] = [[] for _ in range(3)]
    strategy = AllReduce(codec=auto((half(), error_feedback(topk(0.1)))))
    workers(
        3, lambda run: train(run, grads=seen[run.rank]), strategy=strategy, said=said, hosts=hosts
    )
    workers(3, lambda run: train(run, grads=plain[run.rank]), hosts=hosts)
    for rank in (1, 2):
        assert all(torch.equal(one, other) for one, other in zip(seen[rank], seen[0], strict=True))
    alike = [
        torch.allclose(one, other, rtol=1e-6) for one, other in zip(seen[0], plain[0], strict=True)
    ]
    assert alike == [True] * (CHOICE + 1) + [False] * (20 - CHOICE - 1)
    (line,) = [line for line in said if line.startswith("codec:")]
    assert line.endswith(
        f"predicted with error_feedback(topk(0.1)), which is taken from step {CHOICE + 1} on"
    )


def test_where_nothing_is_gained_sums_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compressed,
        "predict_step_seconds",
        lambda record, trial, sizes, rate: record.step_seconds / 1.05,
    )
    said: list[str] = []
    found = workers(
        2, lambda run: (train(run), taken(run)), strategy=AllReduce(codec="auto"), said=said
    )
    assert all(
        torch.equal(weights, workers(2, train)[0]) and set(codecs) == {"None"}
        for weights, codecs in found
    )
    assert next(line for line in said if line.startswith("codec:")).endswith("so sums stay exact")


def test_what_was_chosen_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compressed,
        "predict_step_seconds",
        lambda record, trial, sizes, rate: record.step_seconds / 2,
    )
    strategy = AllReduce(codec=auto((error_feedback(topk(0.1)),)))

    def first(run: Run) -> list[str]:
        steps(run, CHOICE + 3, save=True)
        return taken(run)

    def second(run: Run) -> list[str]:
        steps(run, 1, resume=True)
        return taken(run)

    for codecs in (
        *workers(2, first, strategy=strategy, folder=tmp_path),
        *workers(2, second, strategy=strategy, folder=tmp_path),
    ):
        assert set(codecs) == {"error_feedback(gathered(topk(0.1)))"}


def test_its_notation_and_where_it_is_refused() -> None:
    assert AllReduce(codec="auto") == AllReduce(codec=auto())
    strategy = parse_notation("AllReduce(codec=auto((half(), error_feedback(topk(0.01)))))")
    assert parse_notation(format_notation(strategy)) == strategy
    assert auto().candidates == (half(), int8())
    with pytest.raises(UsageError, match="a codec has a way of its own to sum"):
        AllReduce(via="ring", codec="auto")
    with pytest.raises(UsageError, match="give candidates as a tuple of codecs"):
        auto(())
    with pytest.raises(UsageError, match=r"a codec is wanted, such as int8\(\)"):
        auto((3,))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"auto\(\) works with AllReduce only"):
        LocalSGD(8, codec=auto())  # type: ignore[arg-type]
