"""Torch's own clipping, and who clips in its place."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from paceline.parallel.clipping import (
    check_norm_is_finite,
    compute_local_norm,
    register_clipper,
    unregister_clipper,
)


class Noted:
    """Notes what it is asked for, and lets torch do it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def clip_norm(
        self,
        parameters: list[Tensor],
        max_norm: float,
        norm_type: float,
        own: Callable[[], Tensor],
        *,
        finite: bool = False,
    ) -> Tensor:
        self.asked.append((len(parameters), max_norm, norm_type, *(["finite"] if finite else [])))
        return own()

    def clip_each(self, name: str, own: Callable[[], Any]) -> Any:
        self.asked.append(name)
        return own()

    def check_norm(self, parameters: list[Tensor]) -> None:
        self.asked.append(("norm", len(parameters)))

    def check_idle(self, name: str) -> None:
        self.asked.append(("idle", name))


def weights(count: int = 2) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.full((2,), 3.0)
    return made


def test_the_clipper_of_any_of_the_parameters_is_asked() -> None:
    mine, noted = weights(), Noted()
    register_clipper(mine[:1], noted)
    assert float(clip_grad_norm_((p for p in mine), 1.0, norm_type=float("inf"))) == 3.0
    clip_grad_value_(mine, clip_value=0.5)
    clip_grads_with_norm_(mine, 1.0, torch.tensor(10.0))
    # torch's own clip_grad_norm_ goes through clip_grads_with_norm_
    assert noted.asked == [
        (2, 1.0, float("inf")),
        "clip_grads_with_norm_",
        "clip_grad_value_",
        "clip_grads_with_norm_",
    ]
    assert all(p.grad is not None and torch.allclose(p.grad, torch.full((2,), 0.05)) for p in mine)


def test_the_clipper_hears_whether_the_norm_has_to_be_finite() -> None:
    mine, noted = weights(), Noted()
    register_clipper(mine, noted)
    clip_grad_norm_(mine, 1.0, 2.0, True)
    clip_grad_norm_(mine, 1.0, error_if_nonfinite=True)
    assert [asked for asked in noted.asked if "finite" in asked] == [(2, 1.0, 2.0, "finite")] * 2
    for norm in (float("nan"), float("inf")):
        with pytest.raises(
            RuntimeError,
            match=(
                r"The total norm of order 2\.0 for gradients from `parameters` is non-finite, so "
                r"it cannot"
            ),
        ):
            check_norm_is_finite(norm, 2.0)


def test_the_norm_of_parameters_of_which_some_are_cut_is_checked() -> None:
    mine, others, noted = weights(), weights(), Noted()
    register_clipper(others, noted)
    register_clipper(mine, noted, cut=True)
    for grads in (
        [p.grad for p in others],
        [mine[0].grad, others[0].grad],
        (p.grad.detach() for p in mine if p.grad is not None),
    ):
        get_total_norm(grads)  # type: ignore[arg-type]
    assert noted.asked == [("norm", 1), ("norm", 2)]
    assert (
        mine[0].grad is not None
        and float(get_total_norm(mine[0].grad))
        == float(compute_local_norm([mine[0].grad], 2.0))
        > 4
    )
    assert noted.asked == [("norm", 1), ("norm", 2), ("norm", 1)]
    unregister_clipper(mine)
    assert (
        float(get_total_norm([p.grad for p in mine if p.grad is not None])) == pytest.approx(6.0)
        and len(noted.asked) == 3
    )


def test_calls_without_gradients_are_checked() -> None:
    mine, noted = weights(), Noted()
    register_clipper(mine, noted, cut=True)
    assert float(get_total_norm([])) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        assert float(clip_grad_norm_([], 1.0)) == 0
    for parameter in mine:
        parameter.grad = None
    clip_grads_with_norm_(mine, 1.0, torch.tensor(10.0))
    assert noted.asked == [
        ("idle", "get_total_norm"),
        ("idle", "clip_grad_norm_"),
        ("idle", "get_total_norm"),
        ("idle", "clip_grads_with_norm_"),
        ("idle", "clip_grads_with_norm_"),
        "clip_grads_with_norm_",
    ]


def test_other_parameters_are_clipped_by_torch() -> None:
    mine, others, noted = weights(), weights(), Noted()
    register_clipper(mine, noted)
    assert float(clip_grad_norm_(others, 1.0)) == pytest.approx(6.0)
    clip_grad_value_(others[0], 0.1)
    assert (
        others[0].grad is not None
        and float(others[0].grad.max()) == pytest.approx(0.1)
        and noted.asked == []
    )
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in others[:0]), 1.0)


def test_torch_clips_again_afterwards() -> None:
    mine, noted = weights(), Noted()
    register_clipper(mine, noted)
    unregister_clipper(mine)
    unregister_clipper(mine)
    clip_grad_norm_(mine, 1.0)
    assert noted.asked == []
    register_clipper(mine, Noted())  # which nobody keeps
    gc.collect()
    clip_grad_norm_(mine, 1.0)
