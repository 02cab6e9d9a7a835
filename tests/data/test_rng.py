"""Generators go back to where they were, so that the same order is drawn again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from paceline.data import rng
from paceline.errors import DataError


def loader(seed: int = 1, *, shuffle: bool = True) -> DataLoader[int]:
    return DataLoader(range(20), 4, shuffle=shuffle, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def test_shared_generators_draw_the_same_again() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]

    state = rng.get_shared_state()
    first = draw()
    assert draw() != first
    rng.set_shared_state(state)
    assert draw() == first


def test_only_what_is_given_goes_back() -> None:
    state = rng.get_shared_state()
    first, other = float(torch.rand(())), random.random()
    rng.set_shared_state({"torch": state["torch"]})
    assert float(torch.rand(())) == first and random.random() != other


def test_a_loader_gives_the_same_order_again() -> None:
    one = loader()
    state = rng.get_own_state(one)
    first = [batch.tolist() for batch in one]
    assert [batch.tolist() for batch in one] != first
    rng.set_own_state(one, state)
    assert [batch.tolist() for batch in one] == first


def test_the_state_of_a_loader_with_other_generators_is_refused() -> None:
    class Own(RandomSampler):
        def __init__(self) -> None:
            super().__init__(range(20))
            self.chance = random.Random(3)

    with pytest.raises(DataError, match="same sampler, shuffle and generator"):
        rng.set_own_state(DataLoader(range(20), 4, sampler=Own()), rng.get_own_state(loader()))  # type: ignore[arg-type]


def test_a_twin_draws_the_same_and_moves_nothing() -> None:
    generator = torch.Generator().manual_seed(4)
    expected = torch.rand(3, generator=rng.copy_generator(generator)).tolist()
    assert torch.rand(3, generator=generator).tolist() == expected


def test_a_seed_is_drawn_as_a_loader_draws_it() -> None:
    one, other = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    iter(DataLoader(range(4), generator=one))  # type: ignore[arg-type]
    rng.draw_seed(other)
    assert torch.equal(one.get_state(), other.get_state())


def test_marks_tell_states_apart() -> None:
    generator = torch.Generator().manual_seed(4)
    before = rng.mark_state(generator.get_state())
    assert before == rng.mark_state(generator.get_state())
    torch.rand(1, generator=generator)
    assert before != rng.mark_state(generator.get_state())
