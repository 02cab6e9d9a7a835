"""What layers use of each other is found through views, changes in place, numbers and random
draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.following.recorder import ALL_STAGES, UseRecorder


def uses(act: Any) -> dict[int, set[Any]]:
    """What layer 2 uses after `act` has made its input of what layers 0 and 1 have returned."""
    recorder = UseRecorder(nn.Linear(2, 2), range(3))
    with torch.no_grad(), recorder:
        recorder.begin_forward()
        a, b = torch.ones(3, 3), torch.ones(3, 3)
        recorder.leave_layer(0, a)
        recorder.leave_layer(1, {"b": (b, None)})
        recorder.enter_layer(2, act(a, b))
    return {layer: found for layer, found in recorder.uses.items() if found}


def test_values_carry_what_they_were_made_of() -> None:
    assert uses(lambda a, b: a[0].t().reshape(-1)) == {2: {0}}
    assert uses(lambda a, b: [a.sin() + b, 3]) == {2: {0, 1}}
    assert uses(lambda a, b: torch.zeros(3).add_(b[0])) == {2: {1}}
    assert uses(lambda a, b: torch.zeros(a.shape[0], dtype=b.dtype)) == {}


def test_memory_that_is_written_through_a_view_is_known() -> None:
    def write(a: Tensor, b: Tensor) -> Tensor:
        whole = torch.zeros(4, 3)
        whole[:3].copy_(a)
        return whole

    assert uses(write) == {2: {0}}


def test_numbers_and_sizes_that_depend_on_values_are_for_all() -> None:
    assert uses(lambda a, b: b * float(a.sum())) == {ALL_STAGES: {0}, 2: {1}}
    assert uses(lambda a, b: torch.ones(len(a.nonzero()))) == {ALL_STAGES: {0}}


def test_random_draws_are_sources_of_their_own() -> None:
    one, two = uses(lambda a, b: torch.rand(3) + torch.randn(3))[2]
    assert isinstance(one, str) and isinstance(two, str) and one != two


def test_what_a_layer_returns_as_it_came_is_its_own() -> None:
    recorder = UseRecorder(nn.Linear(2, 2), range(3))
    with torch.no_grad(), recorder:
        a = torch.ones(3)
        recorder.leave_layer(0, a)
        recorder.leave_layer(1, a.relu_())
        recorder.enter_layer(2, a)
    assert recorder.uses[2] == {1}


def test_inside_of_layers_nothing_is_noted() -> None:
    recorder = UseRecorder(nn.Linear(2, 2), range(2))
    with torch.no_grad(), recorder:
        a = torch.ones(3)
        recorder.leave_layer(0, a)
        recorder.call_layer(1, lambda x: float(x.sum() * torch.rand(())), (a,), {})
    assert recorder.rows == [[ALL_STAGES], [0], [1, 0]]
