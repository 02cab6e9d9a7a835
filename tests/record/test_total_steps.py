"""The number of steps of a run: what the script says, or epochs times the lengths of the loaders
that lead.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.record.total_steps import TotalSteps


def loader(length: int | None, train: bool | None = None) -> Any:
    return SimpleNamespace(length=length, terms=SimpleNamespace(train=train))


def test_what_the_script_says_holds() -> None:
    told: list[int | None] = []
    total, only = TotalSteps(100, lambda steps, epoch: told.append(steps)), loader(8)
    total.begin_training(3, [only])
    total.add_leading_loader(only)
    assert told == [100]


def test_the_only_loader_that_may_train_is_known_from_the_start() -> None:
    told: list[int | None] = []
    TotalSteps(None, lambda steps, epoch: told.append(steps)).begin_training(
        3, [loader(8), loader(5, train=False)]
    )
    assert told == [None, 24]


def test_of_several_each_is_known_from_its_first_step_on() -> None:
    told: list[int | None] = []
    total, one, other = (
        TotalSteps(None, lambda steps, epoch: told.append(steps)),
        loader(8),
        loader(5),
    )
    total.begin_training(3, [one, other])
    total.add_leading_loader(one)
    total.add_leading_loader(one)
    total.add_leading_loader(other)
    assert told == [None, None, 24, 39]


def test_without_a_length_the_number_is_not_known() -> None:
    told: list[int | None] = []
    total, one, endless = (
        TotalSteps(None, lambda steps, epoch: told.append(steps)),
        loader(8),
        loader(None),
    )
    total.begin_training(3, [one, endless])
    total.add_leading_loader(one)
    total.add_leading_loader(endless)
    assert told == [None, None, 24, None]


def test_turns_outside_of_a_loop_over_epochs_tell_nothing() -> None:
    told: list[int | None] = []
    TotalSteps(None, lambda steps, epoch: told.append(steps)).add_leading_loader(loader(8))
    assert told == [None]


def test_epochs_are_counted_from_one_in_each_loop() -> None:
    told: list[tuple[int | None, tuple[int, int] | None]] = []
    total = TotalSteps(None, lambda steps, epoch: told.append((steps, epoch)))
    total.begin_training(3, [loader(8)])
    for epoch in (1, 2):  # as after a resume
        total.begin_epoch(epoch)
    total.begin_training(5, [loader(8)])
    total.begin_epoch(0)
    assert told == [(None, None), (24, None), (24, (2, 3)), (24, (3, 3)), (40, None), (40, (1, 5))]
