"""Residuals that are cut by parameters: as data, and in runs whose buckets change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.codec import error_feedback
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce, AllReduceSync
from paceline.sync.residual_parts import BucketNames, name_dropped, rebuild_states, split_residuals
from tests.harness.compressed_training import exchange, model
from tests.harness.runs import batches, workers

LAYOUT: BucketNames = [[["a", 2], ["b", 3]], [["c", 1]]]
OTHER: BucketNames = [[["c", 1]], [["d", 2], ["b", 3]], [["a", 2]]]


def state(*values: float) -> dict[str, Any]:
    """One of a codec that stands in two others, and begins its next sum somewhere."""
    return {
        "residual": torch.tensor(values),
        "inner": {"codec": {"residual": -torch.tensor(values)}, "q": torch.ones(1)},
    }


def test_residuals_go_where_their_parameters_are_and_all_else_begins_anew() -> None:
    parts = split_residuals([state(1, 2, 3, 4, 5), state(6)], LAYOUT)
    first, second, third = rebuild_states(
        [state(0), state(0, 0, 7, 7, 7), state(8, 8)], OTHER, parts
    )
    assert first["residual"].tolist() == [6] and third["residual"].tolist() == [1, 2]
    assert second["residual"].tolist() == [0, 0, 3, 4, 5]  # d had none
    assert second["inner"]["codec"]["residual"].tolist() == [0, 0, -3, -4, -5] and second["inner"][
        "q"
    ].tolist() == [1]


def test_what_fits_no_more_is_zero_and_named_where_it_lies_nowhere() -> None:
    parts = split_residuals([state(1, 2, 3, 4, 5), state(6)], LAYOUT)
    grown = rebuild_states([state(0, 0, 0, 0)], [[["a", 3], ["c", 1]]], parts)
    assert grown[0]["residual"].tolist() == [0, 0, 0, 6]
    assert rebuild_states([{}], [[["a", 2]]], parts) == [{}]  # exact, or of another worker
    assert name_dropped(OTHER, LAYOUT, [state(1, 2, 3, 4, 5), state(6)]) == ""
    assert name_dropped([[["b", 3]]], LAYOUT, [state(1, 2, 3, 4, 5), state(6)]) == "a and 1 more"
    assert name_dropped([[["b", 3], ["c", 1]]], LAYOUT, [state(1, 2, 3, 4, 5), {}]) == "a"


def kept(run: Run) -> dict[str, Tensor]:
    """What this worker has kept of each parameter."""
    coded = exchange(run)._coded
    assert coded is not None
    found = coded.state_dict()
    return {
        name: part["residual"].double()
        for name, part in split_residuals(found["states"], found["layout"]).items()
    }


def begin(run: Run, frozen: bool = False) -> tuple[Any, ...]:
    net = model()
    next(net.children()).requires_grad_(not frozen)
    return run.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.05), batches(dtype=torch.float32)
    )


def totals(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all workers have kept together."""
    return {name: torch.stack([each[name] for each in found]).sum(0) for name in found[0]}


def saved(run: Run, frozen: bool) -> dict[str, Tensor]:
    net, optimizer, loader = begin(run, frozen)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        if run.steps == 1:
            break
    run.save()
    return kept(run)


def resumed(run: Run, frozen: bool) -> dict[str, Tensor]:
    begin(run, frozen)
    assert run.resume()
    return kept(run)


@pytest.mark.parametrize(
    ("codec", "before", "now"),
    [
        (error_feedback(powersgd(2)), (0.001, False), (8.0, False)),
        (error_feedback(topk(0.1)), (8.0, True), (0.001, False)),
        (error_feedback(topk(0.1)), (8.0, False), (8.0, True)),
    ],
    ids=["larger buckets", "smaller ones, and more is trained", "less is trained"],
)
def test_a_run_goes_on_with_what_was_kept_in_other_buckets(
    codec: Any, before: tuple[float, bool], now: tuple[float, bool], tmp_path: Path
) -> None:
    """They are larger or smaller, or have parameters that were frozen, or lack some that are."""
    said: list[str] = []
    old = totals(
        workers(
            2,
            lambda run: saved(run, before[1]),
            strategy=AllReduce(bucket_mb=before[0], codec=codec),
            folder=tmp_path,
        )
    )
    strategy = AllReduce(bucket_mb=now[0], codec=codec)
    new = totals(
        workers(2, lambda run: resumed(run, now[1]), strategy=strategy, folder=tmp_path, said=said)
    )
    assert len(new) == 6 - 2 * now[1] and len(old) == 6 - 2 * before[1]
    for name, residual in new.items():
        assert torch.equal(residual, old[name]) if name in old else not residual.any(), name
    assert now[1] == any(
        "residual of the gradient of 0.bias and 1 more is dropped" in text for text in said
    ), said


def test_a_checkpoint_of_an_older_version_goes_on_where_the_same_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doesn't say how parameters lie in buckets, nor which have no place there."""
    own, strategy = AllReduceSync.state_dict, AllReduce(codec=error_feedback(topk(0.1)))

    def older(sync: AllReduceSync) -> dict[str, Any]:
        state = own(sync)
        return {
            "order": state["order"],
            "coded": {key: state["coded"][key] for key in ("codec", "states")},
        }

    monkeypatch.setattr(AllReduceSync, "state_dict", older)
    old = totals(workers(2, lambda run: saved(run, False), strategy=strategy, folder=tmp_path))
    monkeypatch.undo()
    new = totals(workers(2, lambda run: resumed(run, False), strategy=strategy, folder=tmp_path))
    assert len(new) == 6 and all(torch.equal(residual, old[name]) for name, residual in new.items())
    with pytest.raises(
        UsageError,
        match=r"has the gradient of .* in a codec, and no such parameter is trained here",
    ):
        workers(2, lambda run: resumed(run, True), strategy=strategy, folder=tmp_path)


def test_one_worker_exchanges_nothing_and_says_what_it_drops(tmp_path: Path) -> None:
    strategy, said = AllReduce(codec=error_feedback(topk(0.1))), list[str]()
    workers(2, lambda run: saved(run, False), strategy=strategy, folder=tmp_path)
    workers(1, lambda run: resumed(run, False), strategy=strategy, folder=tmp_path, said=said)
    assert any(
        "residual of the gradient of 4.bias and 5 more is dropped: it is not exchanged here" in text
        for text in said
    ), said


def test_what_was_kept_stays_where_buckets_are_made_anew_as_more_is_trained() -> None:
    def body(run: Run) -> None:
        net, optimizer, loader = begin(run, frozen=True)
        before: dict[str, Tensor] = {}
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            if before:
                break
            before = kept(run)
            net[0].requires_grad_(True)
        sync = exchange(run)
        assert list(kept(run)) != list(before) and len(kept(run)) == 6
        before = kept(run)
        sync.attach(sync._slots)  # as for a parameter that is unfrozen
        sync._lay_out([3, 1, 0, 5, 4, 2], set())
        assert list(kept(run)) != list(before)
        assert any(residual.any() for residual in before.values())
        assert all(torch.equal(residual, before[name]) for name, residual in kept(run).items())

    workers(2, body, strategy=AllReduce(codec=error_feedback(topk(0.1))))
