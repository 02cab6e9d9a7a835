"""The advection-diffusion equation on a periodic square of length 1, and samples of it, which are
solved as they are read.

    du/dt + v . grad u = kappa * laplace u       u(x, y) is carried along by a steady flow v(x, y)
                                                 without sources, and spreads

    derivatives   in Fourier space; products on the grid, of the lower two thirds of the waves
                  (Orszag 1971)
    time          Runge and Kutta's fourth order; diffusion by its integrating factor, which is
                  exact

Sample n follows from the seed and n alone, so there is no file, and no end. Waves are drawn, not
points: finer grids show the same fields.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.servers.process.row_optimizers import make_initial_values

# of what is given: the field, the flow along x, the flow along y, and the diffusivity (see
# `_scale_diffusivity`)
CHANNELS = 4
FIELD_WAVES, FLOW_WAVES = 4, 2  # the highest that are drawn, along each dimension
DIFFUSIVITIES = (1e-3, 1e-2)  # the least that are drawn, and the most


class SolvedBatch(NamedTuple):
    """What is given (samples, CHANNELS, grid, grid), and the field after the time (samples, 1,
    grid, grid), as float32.
    """

    given: Tensor
    after: Tensor


@dataclass(frozen=True)
class Advection:
    """The parameters of a solution: points along each side of the square, the time that passes, and
    the solver's steps in time.

    The solver takes so many steps while a flow of speed 1 goes from point to point; with 1.05 or
    more it is stable.
    """

    grid: int = 32
    time: float = 0.25
    steps_per_point: float = 1.5

    @property
    def step_count(self) -> int:
        """Count the steps of a solution."""
        return math.ceil(self.steps_per_point * self.time * self.grid)

    def read_samples(self, samples: Tensor, seed: int) -> SolvedBatch:
        """Draw the samples of these numbers (int64), and solve them."""
        field, flow, diffusivity = self.draw_samples(samples, seed)
        after = self.solve_fields(field, flow, diffusivity)
        scaled = _scale_diffusivity(diffusivity)[:, None, None, None].expand(
            -1, 1, self.grid, self.grid
        )
        return SolvedBatch(
            torch.cat([field[:, None], flow, scaled], dim=1).float(), after[:, None].float()
        )

    def draw_samples(self, samples: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw fields (samples, grid, grid) of mean square 1, flows (samples, 2, grid, grid) of
        speeds up to 1, and diffusivities.
        """
        counts = (2 * _count_modes(FIELD_WAVES), 2 * _count_modes(FLOW_WAVES), 2, 2)
        field, stream, wind, rest = make_initial_values(
            samples, sum(counts), torch.float64, seed=seed, std=1.0
        ).split(counts, dim=1)
        chance = (1 + torch.erf(rest / math.sqrt(2))) / 2  # even, from 0 to 1
        u = _to_points(_make_spectrum(field, FIELD_WAVES, self.grid), self.grid)
        along, across = _make_wave_numbers(self.grid)
        waves = _make_spectrum(stream, FLOW_WAVES, self.grid)
        swirl = _to_points(
            torch.stack([1j * across * waves, -1j * along * waves], dim=1), self.grid
        )
        flow = swirl / swirl.square().mean((1, 2, 3), keepdim=True).sqrt() + wind[:, :, None, None]
        speed = flow.square().sum(1).amax((1, 2)).sqrt()
        low, high = (math.log(value) for value in DIFFUSIVITIES)
        return (
            u / u.square().mean((1, 2), keepdim=True).sqrt(),
            flow * ((1 + chance[:, 0]) / 2 / speed)[:, None, None, None],
            (low + (high - low) * chance[:, 1]).exp(),
        )

    def solve_fields(self, field: Tensor, flow: Tensor, diffusivity: Tensor) -> Tensor:
        """Return fields after the time, for fields (samples, grid, grid), flows (samples, 2,
        grid, grid) and a diffusivity each.
        """
        along, across = _make_wave_numbers(self.grid, field.dtype)
        step = self.time / self.step_count
        kept = (along.abs() < 2 * math.pi * self.grid / 3) & (across < 2 * math.pi * self.grid / 3)
        # what diffusion leaves in half a step
        half = torch.exp(-diffusivity[:, None, None] * (along**2 + across**2) * (step / 2)) * kept
        whole = half * half

        def carried(waves: Tensor) -> Tensor:
            """Compute the change by the flow, during a step."""
            moved = _to_waves(flow * _to_points(waves, self.grid)[:, None])
            return (along * moved[:, 0] + across * moved[:, 1]) * (-1j * step * kept)

        waves = _to_waves(field) * kept
        for _ in range(self.step_count):
            first = carried(waves)
            second = carried(half * (waves + first / 2))
            third = carried(half * waves + second / 2)
            fourth = carried(whole * waves + half * third)
            waves = whole * waves + (whole * first + 2 * half * (second + third) + fourth) / 6
        return _to_points(waves, self.grid)

    def solve_coarsely(self, given: Tensor) -> Tensor:
        """Solve what is `given` on every other point of the grid, with half the steps; return it
        on the whole grid, as `Solved.after`.
        """
        points = given[:, :, ::2, ::2].double()
        solver = replace(self, grid=self.grid // 2)
        solved = _to_waves(
            solver.solve_fields(
                points[:, 0], points[:, 1:3], _unscale_diffusivity(points[:, 3, 0, 0])
            )
        )
        waves = solved.new_zeros(len(given), self.grid, self.grid // 2 + 1)
        half = solver.grid // 2  # the solver keeps no wave as high as that
        waves[:, :half, :half], waves[:, -half:, :half] = (
            solved[:, :half, :half],
            solved[:, -half:, :half],
        )
        return 4 * _to_points(waves, self.grid)[:, None].float()


class SolvedSamples(Dataset[Any]):
    """`count` samples from `first` on, solved by the batch."""

    def __init__(self, equation: Advection, seed: int, first: int, count: int) -> None:
        self._equation, self._seed, self._first, self._count = equation, seed, first, count

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> SolvedBatch:
        """Solve all samples of a batch at once."""
        return self._equation.read_samples(
            torch.tensor(indices, dtype=torch.int64) + self._first, self._seed
        )

    def make_loader(self, batch: int) -> DataLoader[SolvedBatch]:
        """Make a DataLoader in the order of the numbers."""
        return DataLoader(self, batch, collate_fn=_keep_batch)


def compute_relative_errors(predicted: Tensor, after: Tensor) -> Tensor:
    """Return the relative L2 error of each sample."""
    errors: Tensor = (predicted - after).flatten(1).norm(dim=1) / after.flatten(1).norm(dim=1)
    return errors


def _keep_batch(batch: Any) -> Any:
    return batch


def _to_waves(fields: Tensor) -> Tensor:
    waves: Tensor = torch.fft.rfft2(fields)
    return waves


def _to_points(waves: Tensor, grid: int) -> Tensor:
    points: Tensor = torch.fft.irfft2(waves, s=(grid, grid))
    return points


def _scale_diffusivity(diffusivity: Tensor) -> Tensor:
    """Return the diffusivity as models are given it: its logarithm, from -1 to 1."""
    low, high = (math.log(value) for value in DIFFUSIVITIES)
    return (diffusivity.log() - low) * (2 / (high - low)) - 1


def _unscale_diffusivity(scaled: Tensor) -> Tensor:
    low, high = (math.log(value) for value in DIFFUSIVITIES)
    return (low + (scaled + 1) * ((high - low) / 2)).exp()


def _count_modes(highest: int) -> int:
    return (2 * highest + 1) * (highest + 1)


def _make_wave_numbers(grid: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the wave numbers along x (grid, 1) and y (1, grid // 2 + 1) of what rfft2 makes of
    fields.
    """
    along, across = (
        torch.fft.fftfreq(grid, 1 / grid, dtype=dtype),
        torch.fft.rfftfreq(grid, 1 / grid, dtype=dtype),
    )
    return 2 * math.pi * along[:, None], 2 * math.pi * across[None]


def _make_spectrum(numbers: Tensor, highest: int, grid: int) -> Tensor:
    """Lay numbers (samples, 2 * modes) out as the spectrum of fields of mean 0, the shorter a
    wave the weaker.
    """
    waves = torch.zeros(len(numbers), grid, grid // 2 + 1, dtype=torch.complex128)
    drawn = torch.view_as_complex(numbers.reshape(len(numbers), 2 * highest + 1, highest + 1, 2))
    rows = torch.arange(-highest, highest + 1)
    strength = torch.exp(-(rows[:, None] ** 2 + torch.arange(highest + 1) ** 2) / highest**2)
    strength[highest, 0] = 0
    waves[:, rows % grid, : highest + 1] = drawn * strength * grid**2
    return waves
