"""The advection-diffusion equation on a periodic square of length 1, and samples of solutions.

    du/dt + v . grad u = kappa * laplace u       A steady flow v(x, y) without sources carries the
                                                 field u(x, y) along, while the field spreads.

    derivatives   in Fourier space; products on the grid, of the lower two thirds of the waves
                  (Orszag 1971)
    time          fourth-order Runge-Kutta; diffusion by its integrating factor, which is exact

Samples are solved when they are read. Sample n depends on the seed and n alone, so there is no file
and no last sample. Random numbers set the waves, not the points, so finer grids show the same
fields.
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

# Channels of an input: the field, the flow along x, the flow along y, and the scaled diffusivity
# (see `_scale_diffusivity`).
CHANNELS = 4
FIELD_WAVES, FLOW_WAVES = 4, 2  # highest wave number along each dimension
DIFFUSIVITIES = (1e-3, 1e-2)  # smallest and largest diffusivity of a sample


class SolvedBatch(NamedTuple):
    """Inputs and solutions of some samples, as float32.

    Attributes:
        given: Inputs of the solver, (samples, CHANNELS, grid, grid).
        after: Fields at the end of the time, (samples, 1, grid, grid).
    """

    given: Tensor
    after: Tensor


@dataclass(frozen=True)
class Advection:
    """Parameters of a solution.

    Attributes:
        grid: Number of points along each side of the square.
        time: Time from the input to the solution. The fastest flow crosses the square in 1.
        steps_per_point: Number of time steps in which a flow of speed 1 goes from one point to the
            next. The solver is stable with 1.05 or more.
    """

    grid: int = 32
    time: float = 0.25
    steps_per_point: float = 1.5

    @property
    def step_count(self) -> int:
        """Number of time steps of a solution."""
        return math.ceil(self.steps_per_point * self.time * self.grid)

    def read_samples(self, samples: Tensor, seed: int) -> SolvedBatch:
        """Draw the samples with these indices, and solve them.

        Args:
            samples: Indices of the samples, int64.
            seed: Seed of all samples.
        """
        field, flow, diffusivity = self.draw_samples(samples, seed)
        after = self.solve_fields(field, flow, diffusivity)
        scaled = _scale_diffusivity(diffusivity)[:, None, None, None].expand(
            -1, 1, self.grid, self.grid
        )
        return SolvedBatch(
            torch.cat([field[:, None], flow, scaled], dim=1).float(), after[:, None].float()
        )

    def draw_samples(self, samples: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the inputs of the samples with these indices.

        Args:
            samples: Indices of the samples, int64.
            seed: Seed of all samples.

        Returns:
            Fields (samples, grid, grid) with a mean square of 1, flows (samples, 2, grid, grid)
            with speeds of at most 1, and diffusivities (samples).
        """
        counts = (2 * _count_modes(FIELD_WAVES), 2 * _count_modes(FLOW_WAVES), 2, 2)
        field_values, stream_values, wind, normal = make_initial_values(
            samples, sum(counts), torch.float64, seed=seed, std=1.0
        ).split(counts, dim=1)
        uniform = (1 + torch.erf(normal / math.sqrt(2))) / 2  # evenly spread from 0 to 1
        fields = _to_points(_make_spectrum(field_values, FIELD_WAVES, self.grid), self.grid)
        # The flow is the curl of a stream function, so it has no sources.
        along, across = _make_wave_numbers(self.grid)
        waves = _make_spectrum(stream_values, FLOW_WAVES, self.grid)
        swirl = _to_points(
            torch.stack([1j * across * waves, -1j * along * waves], dim=1), self.grid
        )
        flow = swirl / swirl.square().mean((1, 2, 3), keepdim=True).sqrt() + wind[:, :, None, None]
        speed = flow.square().sum(1).amax((1, 2)).sqrt()
        # The largest speed of a flow is from 0.5 to 1. Diffusivities are log-uniform.
        low, high = (math.log(value) for value in DIFFUSIVITIES)
        return (
            fields / fields.square().mean((1, 2), keepdim=True).sqrt(),
            flow * ((1 + uniform[:, 0]) / 2 / speed)[:, None, None, None],
            (low + (high - low) * uniform[:, 1]).exp(),
        )

    def solve_fields(self, field: Tensor, flow: Tensor, diffusivity: Tensor) -> Tensor:
        """Compute the fields at the end of the time.

        Args:
            field: Fields at the start, (samples, grid, grid).
            flow: Velocities along x and y, (samples, 2, grid, grid).
            diffusivity: Diffusivity of each sample, (samples).
        """
        along, across = _make_wave_numbers(self.grid, field.dtype)
        step = self.time / self.step_count
        limit = 2 * math.pi * self.grid / 3
        resolved = (along.abs() < limit) & (across < limit)
        # The integrating factor: the part of each wave that diffusion leaves after half a step, and
        # after a full one.
        decay = diffusivity[:, None, None] * (along**2 + across**2)
        half = torch.exp(-decay * (step / 2)) * resolved
        full = half * half

        def advect(waves: Tensor) -> Tensor:
            """Compute the change of the waves by the flow in one step."""
            flux = _to_waves(flow * _to_points(waves, self.grid)[:, None])
            return (along * flux[:, 0] + across * flux[:, 1]) * (-1j * step * resolved)

        waves = _to_waves(field) * resolved
        for _ in range(self.step_count):
            first = advect(waves)
            second = advect(half * (waves + first / 2))
            third = advect(half * waves + second / 2)
            fourth = advect(full * waves + half * third)
            waves = full * waves + (full * first + 2 * half * (second + third) + fourth) / 6
        return _to_points(waves, self.grid)

    def solve_coarsely(self, given: Tensor) -> Tensor:
        """Solve on every other point of the grid, with half the number of time steps.

        Args:
            given: Inputs of the solver, as `SolvedBatch.given`.

        Returns:
            Solutions on the whole grid, as `SolvedBatch.after`.
        """
        points = given[:, :, ::2, ::2].double()
        solver = replace(self, grid=self.grid // 2)
        solved = _to_waves(
            solver.solve_fields(
                points[:, 0], points[:, 1:3], _unscale_diffusivity(points[:, 3, 0, 0])
            )
        )
        waves = solved.new_zeros(len(given), self.grid, self.grid // 2 + 1)
        # Put the coarse spectrum into the corners of the fine one. The solver keeps no wave as high
        # as `half`, so nothing is cut off. The factor 4 is the ratio of the numbers of points.
        half = solver.grid // 2
        waves[:, :half, :half], waves[:, -half:, :half] = (
            solved[:, :half, :half],
            solved[:, -half:, :half],
        )
        return 4 * _to_points(waves, self.grid)[:, None].float()


class SolvedSamples(Dataset[Any]):
    """A data set of consecutive samples, which are solved one batch at a time.

    Args:
        equation: Parameters of the solutions.
        seed: Seed of all samples.
        first: Index of the first sample.
        count: Number of samples.
    """

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
        """Make a DataLoader of these samples, in the order of their indices."""
        return DataLoader(self, batch, collate_fn=_keep_batch)


def compute_relative_errors(predicted: Tensor, after: Tensor) -> Tensor:
    """Compute the relative L2 error of each sample."""
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
    """Scale diffusivities for the input of a model: their logarithm, from -1 to 1."""
    low, high = (math.log(value) for value in DIFFUSIVITIES)
    return (diffusivity.log() - low) * (2 / (high - low)) - 1


def _unscale_diffusivity(scaled: Tensor) -> Tensor:
    low, high = (math.log(value) for value in DIFFUSIVITIES)
    return (low + (scaled + 1) * ((high - low) / 2)).exp()


def _count_modes(highest: int) -> int:
    return (2 * highest + 1) * (highest + 1)


def _make_wave_numbers(grid: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Make the wave numbers of rfft2: along x (grid, 1) and along y (1, grid // 2 + 1)."""
    along, across = (
        torch.fft.fftfreq(grid, 1 / grid, dtype=dtype),
        torch.fft.rfftfreq(grid, 1 / grid, dtype=dtype),
    )
    return 2 * math.pi * along[:, None], 2 * math.pi * across[None]


def _make_spectrum(numbers: Tensor, highest: int, grid: int) -> Tensor:
    """Arrange random numbers as the spectrum of fields with mean 0. Shorter waves are weaker.

    Args:
        numbers: Normal random numbers, (samples, 2 * modes).
        highest: Highest wave number along each dimension.
        grid: Number of points along each side.
    """
    waves = torch.zeros(len(numbers), grid, grid // 2 + 1, dtype=torch.complex128)
    drawn = torch.view_as_complex(numbers.reshape(len(numbers), 2 * highest + 1, highest + 1, 2))
    wave_rows = torch.arange(-highest, highest + 1)
    strength = torch.exp(-(wave_rows[:, None] ** 2 + torch.arange(highest + 1) ** 2) / highest**2)
    strength[highest, 0] = 0  # the mean
    waves[:, wave_rows % grid, : highest + 1] = drawn * strength * grid**2
    return waves
