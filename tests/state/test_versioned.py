"""Named parts of a state go back to where they were, and a state of something else is named."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError, UsageError
from paceline.state.snapshot import make_snapshot, snapshot_from_bytes
from paceline.state.versioned import GeneratorStates, UnownedParameters, VersionedState


def test_freed_tensors_are_not_taken_for_each_other() -> None:
    class State:
        """Its tensors are made when they are asked for, and nobody else holds them."""

        def state_dict(self) -> OrderedDict[str, Tensor]:
            return OrderedDict((str(i), torch.full((1000,), float(i))) for i in range(20))

        def load_state_dict(self, state: Any) -> None: ...

    both = VersionedState(one=State(), two=State()).take_snapshot().unpack_state()
    assert [both["two"][str(i)][0].item() for i in range(20)] == list(range(20))


# Versioned
# --------------------------------------------------------------------------------------------------


def training(
    width: int = 8, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[VersionedState, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2)
    )
    optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    state = VersionedState(
        model=model, optimizer=optimizer, scheduler=scheduler, random=GeneratorStates()
    )

    def step() -> float:
        loss = model(torch.randn(6, 4)).square().mean() + random.random() + np.random.rand()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        state.advance_version()
        return loss.item()

    return state, step


@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad],
    ids=lambda kind: kind.__name__,
)
def test_going_back_and_forth_gives_the_same_bits(kind: type[torch.optim.Optimizer]) -> None:
    state, step = training(kind=kind)
    for _ in range(3):
        step()
    before = state.take_snapshot()
    first, end = [step() for _ in range(5)], state.compute_hash()
    for source in (before, snapshot_from_bytes(before.to_bytes())):
        state.restore_snapshot(source)
        assert state.version == 3
        assert state.compute_hash() == before.compute_sha256()
        assert [step() for _ in range(5)] == first
        assert state.compute_hash() == end


def test_a_new_process_goes_on_where_the_old_one_was() -> None:
    state, step = training()
    step()
    saved = state.take_snapshot().to_bytes()
    expected = [step() for _ in range(4)]
    again, step = training()
    again.restore_snapshot(snapshot_from_bytes(saved))
    assert [step() for _ in range(4)] == expected


def test_random_generators_in_full() -> None:
    random.gauss(0, 1)  # leaves a second value behind, which is part of the state
    np.random.randn()
    randomness = GeneratorStates()
    state = snapshot_from_bytes(make_snapshot(randomness.state_dict()).to_bytes()).unpack_state()
    draw = lambda: (  # noqa: E731
        random.gauss(0, 1),
        random.random(),
        np.random.randn(3).tolist(),
        torch.randn(3).tolist(),
    )
    expected = draw()
    randomness.load_state_dict(state)
    assert draw() == expected


def test_another_model_is_one_error_with_the_first_differences() -> None:
    state, _ = training(width=8)
    other, step = training(width=9)
    step()
    before = other.compute_hash()
    with pytest.raises(CheckpointError) as caught:
        other.restore_snapshot(state.take_snapshot())
    assert "model.0.weight is float32[8, 4] in it, float32[9, 4] here" in str(caught.value)
    assert "more" in str(caught.value)
    assert other.compute_hash() == before


def test_other_parts_and_groups_are_named() -> None:
    model = nn.Linear(2, 2)
    snapshot = VersionedState(
        model=model, optimizer=torch.optim.SGD(model.parameters())
    ).take_snapshot()
    with pytest.raises(CheckpointError, match=r"lacks scaler.*it has optimizer"):
        VersionedState(model=model, scaler=torch.amp.GradScaler("cpu")).restore_snapshot(snapshot)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    with pytest.raises(
        CheckpointError, match=r"groups of \[2\] parameters in it, of \[1, 1\] here"
    ):
        VersionedState(model=model, optimizer=torch.optim.SGD(groups, lr=0.1)).restore_snapshot(
            snapshot
        )
    with pytest.raises(
        CheckpointError, match=r"model\.weight is float32\[2, 2\] in it, float64\[2, 2\] here"
    ):
        VersionedState(
            model=nn.Linear(2, 2).double(), optimizer=torch.optim.SGD(model.parameters())
        ).restore_snapshot(snapshot)


def test_a_part_that_refuses_its_state_is_named() -> None:
    class Picky:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    state = VersionedState(model=nn.Linear(1, 1), picky=Picky())
    with pytest.raises(
        CheckpointError,
        match=r"picky \(.*Picky\) refused its state \(model had been loaded before it\): 'b'",
    ):
        state.restore_snapshot(state.take_snapshot())


def test_parameters_of_no_model() -> None:
    kept, weights = (
        UnownedParameters(),
        [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor(3.0))],
    )
    state = VersionedState(model=nn.Linear(1, 1))
    kept.add_parameters([], state)
    before = state.take_snapshot()
    kept.add_parameters(weights, state)
    saved = state.take_snapshot()
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    # written by a paceline that didn't save them
    assert state.restore_snapshot(before) == ("parameters of no model",)
    assert [float(weight.detach().sum()) for weight in weights] == [0.0, 0.0]
    assert state.restore_snapshot(saved) == ()
    assert [float(weight.detach().sum()) for weight in weights] == [3.0, 3.0]
    kept.add_parameters([nn.Parameter(torch.ones(4))], state)
    with pytest.raises(
        CheckpointError,
        match=(
            r"float32\[2\], float32\[\], and here optimizers have .*float32\[4\] that are in no "
            r"model"
        ),
    ):
        state.restore_snapshot(saved)


def test_the_state_of_another_optimizer() -> None:
    model = nn.Linear(1, 1)
    saved = VersionedState(optimizer=torch.optim.SGD(model.parameters(), 0.1)).take_snapshot()
    older = saved.unpack_state()
    del older["classes"]  # a paceline that didn't say them yet
    with pytest.raises(
        CheckpointError,
        match=r"optimizer \(AdamW\) refused its state: it is of another optimizer, without betas, eps",  # noqa: E501
    ):
        VersionedState(optimizer=torch.optim.AdamW(model.parameters())).restore_snapshot(
            make_snapshot(older)
        )
    del older["optimizer"]["param_groups"][0]["foreach"]  # a torch that didn't have it yet
    VersionedState(optimizer=torch.optim.SGD(model.parameters(), 0.1)).restore_snapshot(
        make_snapshot(older)
    )


def test_optimizers_and_schedulers_of_another_class_are_named() -> None:
    """Their states fit, as torch sees it."""
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    saved = VersionedState(
        optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ).take_snapshot()
    other = torch.optim.RAdam(nn.Linear(1, 1).parameters())
    with pytest.raises(
        CheckpointError,
        match=(
            r"optimizer is a AdamW in it, a RAdam here; scheduler is a StepLR in it, a ConstantLR "
            r"here"
        ),
    ):
        VersionedState(
            optimizer=other, scheduler=torch.optim.lr_scheduler.ConstantLR(other)
        ).restore_snapshot(saved)


def test_names_and_parts_are_checked() -> None:
    state = VersionedState(model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="'model' already"):
        state.add_part("model", nn.Linear(1, 1))
    with pytest.raises(UsageError, match="without state_dict"):
        state.add_part("x", object())  # type: ignore[arg-type]
    assert state.names == ("model",)
