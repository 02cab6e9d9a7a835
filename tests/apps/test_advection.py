"""The solver against solutions that are known, and the samples that it makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.apps.advection import DIFFUSIVITIES, Advection, SolvedSamples, compute_relative_errors

EQUATION = Advection()


def grid(points: int) -> tuple[Tensor, Tensor]:
    """The coordinates x and y of all points."""
    ticks = torch.arange(points, dtype=torch.float64) / points
    return ticks[:, None].expand(points, points), ticks[None].expand(points, points)


def wave(number: tuple[int, int], moved: tuple[float, float], points: int = 32) -> Tensor:
    """A Fourier mode that has been carried so far."""
    x, y = grid(points)
    return torch.cos(2 * math.pi * (number[0] * (x - moved[0]) + number[1] * (y - moved[1])) + 0.3)


def test_a_mode_is_carried_along_and_decays() -> None:
    """u = exp(-kappa k^2 t) cos(k . (x - v t)): a flow, a wave and a diffusivity for each
    sample.
    """
    waves, flows, kappas = (
        [(1, 0), (3, -2), (-5, 7)],
        [(0.5, 0.2), (-0.9, 0.1), (0.0, 1.0)],
        [0.01, 0.001, 0.003],
    )
    fields = torch.stack([wave(number, (0, 0)) for number in waves])
    flow = torch.tensor(flows, dtype=torch.float64)[:, :, None, None].expand(-1, -1, 32, 32)
    found = replace(EQUATION, steps_per_point=12).solve_fields(
        fields, flow, torch.tensor(kappas, dtype=torch.float64)
    )
    time = EQUATION.time
    for one, number, (vx, vy), kappa in zip(found, waves, flows, kappas, strict=True):
        decay = math.exp(-kappa * (2 * math.pi) ** 2 * (number[0] ** 2 + number[1] ** 2) * time)
        assert torch.allclose(one, decay * wave(number, (vx * time, vy * time)), atol=2e-5)


def test_the_error_falls_with_the_fourth_power_of_the_step() -> None:
    flow = torch.tensor([0.7, -0.4], dtype=torch.float64)[None, :, None, None].expand(
        -1, -1, 32, 32
    )
    wanted = wave((3, 2), (0.7 * EQUATION.time, -0.4 * EQUATION.time))[None]

    def error(steps_per_point: float) -> float:
        solver = replace(EQUATION, steps_per_point=steps_per_point)
        return float(
            compute_relative_errors(
                solver.solve_fields(wave((3, 2), (0, 0))[None], flow, torch.zeros(1)), wanted
            )
        )

    assert 1e-9 < error(8) < error(4) / 15 < error(2) / 200


def test_a_shear_flow_bends_the_field() -> None:
    """u(x, y, t) = u(x - v(y) t, y, 0) without diffusion: of products of waves, which a uniform
    flow has none of.
    """
    x, y = grid(32)
    speed = 0.5 * torch.sin(2 * math.pi * y)
    found = EQUATION.solve_fields(
        torch.sin(2 * math.pi * x)[None],
        torch.stack([speed, torch.zeros_like(y)])[None],
        torch.zeros(1),
    )
    assert torch.allclose(found[0], torch.sin(2 * math.pi * (x - speed * EQUATION.time)), atol=1e-4)


def test_a_field_that_is_constant_along_the_flow_only_decays() -> None:
    """Vortices whose stream function is the field itself, along both dimensions."""
    x, y = (2 * math.pi * each for each in grid(32))
    field, flow = (
        torch.cos(x) * torch.cos(2 * y),
        torch.stack([-2 * torch.cos(x) * torch.sin(2 * y), torch.sin(x) * torch.cos(2 * y)]),
    )
    found = EQUATION.solve_fields(field[None], flow[None] / 2, torch.full((1,), 0.01))
    assert torch.allclose(
        found[0], field * math.exp(-0.01 * 5 * (2 * math.pi) ** 2 * EQUATION.time), atol=1e-6
    )


def test_samples_are_what_is_said_of_them() -> None:
    field, flow, diffusivity = EQUATION.draw_samples(torch.arange(200), seed=3)
    assert torch.allclose(field.square().mean((1, 2)), torch.ones(200, dtype=torch.float64))
    assert torch.allclose(field.mean((1, 2)), torch.zeros(200, dtype=torch.float64), atol=1e-12)
    speed = flow.square().sum(1).amax((1, 2)).sqrt()
    assert 0.5 <= float(speed.min()) < 0.55 and 0.95 < float(speed.max()) <= 1
    low, high = DIFFUSIVITIES
    assert (
        low < float(diffusivity.min()) < 1.1 * low and 0.9 * high < float(diffusivity.max()) < high
    )
    wide = torch.fft.fftfreq(32, 1 / 32, dtype=torch.float64)
    sources = torch.fft.fft2(flow[:, 0]) * wide[:, None] + torch.fft.fft2(flow[:, 1]) * wide
    assert float(sources.abs().max()) < 1e-9
    solved = EQUATION.solve_fields(field, flow, diffusivity)
    # nothing is lost, and nothing comes
    assert torch.allclose(solved.mean((1, 2)), torch.zeros(200, dtype=torch.float64), atol=1e-12)
    assert bool((solved.square().mean((1, 2)) < 1).all())
    finer = replace(EQUATION, steps_per_point=6).solve_fields(field, flow, diffusivity)
    assert float(compute_relative_errors(solved, finer).max()) < 1e-3


def test_a_finer_grid_has_the_same_fields_and_solutions() -> None:
    coarse, fine = EQUATION, Advection(grid=64)
    (field, flow, _), (twin, other, kappa) = (
        each.draw_samples(torch.arange(8), seed=3) for each in (coarse, fine)
    )
    assert torch.allclose(twin[:, ::2, ::2], field) and torch.allclose(
        other[:, :, ::2, ::2], flow, rtol=0.02, atol=1e-9
    )
    solved = coarse.solve_fields(field, other[:, :, ::2, ::2], kappa)
    assert (
        float(
            compute_relative_errors(
                solved, fine.solve_fields(twin, other, kappa)[:, ::2, ::2]
            ).max()
        )
        < 0.03
    )


def test_a_sample_follows_from_the_seed_and_its_number_alone() -> None:
    one, other = SolvedSamples(EQUATION, 5, 100, 50), SolvedSamples(EQUATION, 5, 103, 50)
    (given, after), (same, late) = one.__getitems__([7, 3, 9]), other.__getitems__([0])
    assert torch.equal(given[1], same[0]) and torch.allclose(after[1], late[0], atol=1e-6)
    assert (
        float(
            compute_relative_errors(
                SolvedSamples(EQUATION, 6, 103, 50).__getitems__([0]).given, same
            )
        )
        > 0.5
    )
    assert float(compute_relative_errors(after, given[:, :1]).min()) > 0.1  # it has to be learned
    assert [len(given) for given, _ in one.make_loader(20)] == [20, 20, 10]


@pytest.mark.parametrize(
    "way", [EQUATION.solve_coarsely, lambda given: given[:, :1]], ids=["coarse", "unchanged"]
)
def test_the_solver_on_half_the_grid_is_between(way: Callable[[Tensor], Tensor]) -> None:
    given, after = EQUATION.read_samples(torch.arange(64), seed=0)
    error = float(compute_relative_errors(way(given), after).mean())
    assert 0.02 < error < 0.2 if way == EQUATION.solve_coarsely else error > 0.8


def test_the_solver_on_half_the_grid_solves_what_it_can_see() -> None:
    given, _ = EQUATION.read_samples(torch.arange(3), seed=0)
    numbers = [(1, 2), (0, 3), (-2, 1)]
    given[:, 0], given[:, 1:3] = (
        torch.stack([wave(number, (0, 0)) for number in numbers]).float(),
        0,
    )
    wanted = EQUATION.solve_fields(
        given[:, 0].double(),
        given[:, 1:3].double(),
        EQUATION.draw_samples(torch.arange(3), seed=0)[2],
    )
    assert torch.allclose(EQUATION.solve_coarsely(given), wanted[:, None].float(), atol=1e-5)
