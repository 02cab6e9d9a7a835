"""What outer optimizers remember: where parameters are unfrozen, and where a run is resumed in
which they are frozen at first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.codec.codec import error_feedback
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.localsgd.outer import nesterov
from paceline.sync.localsgd.strategy import LocalSGD, LocalSGDSync
from tests.harness.models import net, sgd
from tests.harness.runs import batches, parameters, workers

THAWED = 2  # steps, after which a frozen layer is trained: in the middle of a round, or at its end


class Extended(nn.Module):
    """A network with a parameter before it, that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
        self.net = net()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def unfreezing(run: Run, *, thaw: bool) -> Tensor:
    model = Extended()
    model, optimizer, loader = run.prepare(model, sgd(model), batches())
    for x, y in loader:
        model.extra.requires_grad_(thaw and run.steps >= THAWED)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    run._prepared.epochs.finish()
    return parameters(model.net)


@pytest.mark.parametrize("after", [0, 1])
def test_other_parameters_go_on_with_their_momentum(after: int) -> None:
    strategy = LocalSGD(every=1, outer=nesterov(0.7, 0.9), after=after)
    one, _ = workers(2, lambda run: unfreezing(run, thaw=True), strategy=strategy)
    other, _ = workers(2, lambda run: unfreezing(run, thaw=False), strategy=strategy)
    assert torch.equal(one, other)


def thawed(run: Run, steps: int, *, resume: bool = False) -> Tensor:
    model = net()
    model[0].weight.requires_grad_(False)
    model, optimizer, loader = run.prepare(model, sgd(model), batches())
    assert run.resume() == resume
    for _ in run.epochs(2):
        for x, y in loader:
            model[0].weight.requires_grad_(run.steps >= THAWED)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if run.steps == 4 and not resume:
                run.save()
            if run.steps + 1 == steps:
                return parameters(model)
    raise AssertionError


def test_a_run_that_has_unfrozen_a_layer_is_resumed_with_it_frozen(tmp_path: Path) -> None:
    strategy = LocalSGD(every=2, outer=nesterov(0.7, 0.9))
    straight = workers(2, lambda run: thawed(run, 8), strategy=strategy, folder=tmp_path / "a")
    workers(2, lambda run: thawed(run, 5), strategy=strategy, folder=tmp_path / "b")
    later = workers(
        2, lambda run: thawed(run, 8, resume=True), strategy=strategy, folder=tmp_path / "b"
    )
    assert all(torch.equal(one, other) for one, other in zip(later, straight, strict=True))


def test_what_a_codec_has_kept_needs_the_same_parameters(tmp_path: Path) -> None:
    strategy = LocalSGD(every=2, codec=error_feedback(topk(0.2)))
    workers(2, lambda run: thawed(run, 5), strategy=strategy, folder=tmp_path)
    with pytest.raises(
        UsageError,
        match=(
            "with other parameters unfrozen, or with other fragments or bucket_mb, "
            "and its residuals of a codec"
        ),
    ):
        workers(2, lambda run: thawed(run, 8, resume=True), strategy=strategy, folder=tmp_path)


def test_momentum_of_an_older_version_needs_the_same_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands by the numbers of buckets: where those are others it would begin anew."""
    own, strategy = LocalSGDSync.state_dict, LocalSGD(every=2, outer=nesterov(0.7, 0.9))

    def older(sync: LocalSGDSync) -> dict[str, Any]:
        state = own(sync)
        del state["memories"]
        return {**state, "memory": [unit.memory for unit in sync._rounds.units]}

    monkeypatch.setattr(LocalSGDSync, "state_dict", older)
    workers(2, lambda run: thawed(run, 5), strategy=strategy, folder=tmp_path)
    monkeypatch.undo()
    with pytest.raises(
        UsageError, match=r"momentum without names .* resume with the same settings"
    ):
        workers(2, lambda run: thawed(run, 8, resume=True), strategy=strategy, folder=tmp_path)
