"""Batches that a script makes by itself, such as random windows of a text.

    global batch of 8   seeded by its step      0 1 2 3 4 5 6 7      drawn whole by each worker
    worker 0            keeps rows              0 1 2
    worker 1                                          3 4 5
    worker 2                                                6 7

The batches go through a DataLoader like any others, so they have shares, ghosts and weights, are
dealt again after a loss, and are saved and resumed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from paceline.errors import UsageError

# A sample has the number `pass << 32 | position`. The pass is a random number of 31 bits, which the
# sampler draws when a pass begins.
POSITION_BITS = 32
MOST_SAMPLES = 1 << POSITION_BITS
MOST_PASSES = 1 << 31


class OwnShare:
    """This worker's share of a global batch that the script makes by itself.

    >>> ix = share.draw(lambda generator: torch.randint(1000, (share.size,), generator=generator))

    `size` is the number of samples of the global batch, `rows` are those of this worker in it (from
    0 on), and `step` counts the global batches of the pass. `len(share)` is the number of rows.
    """

    def __init__(self, size: int, numbers: Sequence[int]) -> None:
        self.size = size
        positions = [number % MOST_SAMPLES for number in numbers]
        self.rows = [position % size for position in positions]
        self.step = positions[0] // size
        self._seed = _make_seed(numbers[0] >> POSITION_BITS, self.step)
        self._generators: list[torch.Generator] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self.rows)} of the {self.size} rows of batch {self.step}>"

    @property
    def generator(self) -> torch.Generator:
        """Generator of the global batch, on the CPU, in the same state on all workers.

        It begins with a seed made from the pass and the step. A worker that draws its own rows
        alone would draw the first rows of the global batch: use `draw`.
        """
        if not self._generators:
            self._generators.append(torch.Generator().manual_seed(self._seed))
        return self._generators[0]

    def draw(self, make: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Draw random numbers for the global batch, and return the rows of this worker.

        >>> noise = share.draw(lambda generator: torch.randn(share.size, 8, generator=generator))

        The rows are the same as if one worker drew and used them all. Later calls in the same turn
        give further numbers, so all workers must make the same calls in the same order.

        Args:
            make: Function from the generator to a tensor with one row (along dim 0) for each sample
                of the global batch. It must draw from that generator only.

        Returns:
            The rows of this worker, in a new tensor.

        Raises:
            UsageError: The tensor hasn't one row for each sample of the global batch.
        """
        drawn = make(self.generator)
        if not isinstance(drawn, Tensor) or drawn.dim() == 0 or len(drawn) != self.size:
            found = tuple(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__qualname__
            raise UsageError(
                f"share.draw got {found}, and needs a tensor with a row for each of the "
                f"{self.size} samples of all workers: draw the whole batch, as in "
                f"torch.randint(n, ({self.size},), generator=generator)"
            )
        return drawn[self.rows]


def own_batches(
    size: int, *, steps: int, generator: torch.Generator | None = None
) -> DataLoader[OwnShare]:
    """Make a loader for a script that makes its batches by itself.

    >>> batches = run.prepare(pl.own_batches(64, steps=1000))
    >>> for share in batches:
    ...     ix = share.draw(lambda generator: torch.randint(900, (64,), generator=generator))
    ...     x = torch.randn(1000, 100)[ix]  # the rows of this worker

    It gives shares, not batches. Give it to `run.prepare` in place of a DataLoader. Then the global
    batches are the same with any number of workers.

    Args:
        size: Samples of a global batch, of all workers together.
        steps: Number of global batches in a pass.
        generator: Generator from which each pass draws its seed. Default: the one that samplers of
            DataLoaders draw from, which `torch.manual_seed` seeds.

    Returns:
        A DataLoader that gives an `OwnShare` in each step.

    Raises:
        UsageError: `size` or `steps` is below 1, or a pass has 2^32 samples or more.
    """
    if size < 1 or steps < 1 or size * steps >= MOST_SAMPLES:
        raise UsageError(
            f"own_batches({size}, steps={steps}): give 1 or more of both, and fewer than "
            f"{MOST_SAMPLES} samples in all; make several passes for more"
        )
    loader: DataLoader[OwnShare] = DataLoader(
        NumberedSamples(size * steps),  # type: ignore[arg-type]  # the collate function makes shares
        batch_size=size,
        sampler=PassSampler(size * steps, generator),
        generator=generator,
        collate_fn=partial(OwnShare, size),
    )
    return loader


class NumberedSamples(Dataset[int]):
    """A data set whose samples are their own numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return number


class PassSampler(Sampler[int]):
    """Numbers of the samples of a pass, in order. Each pass has another random number."""

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self._count, self.generator = count, generator

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randint(MOST_PASSES, (), generator=self.generator)
        first = int(drawn) << POSITION_BITS
        yield from range(first, first + self._count)


def _make_seed(pass_number: int, step: int) -> int:
    """Seed of a global batch: 32 bits, as torch's generator of the CPU uses no more.

    The steps of a pass have different seeds, as a checksum of 4 bytes is one to one.
    """
    return zlib.crc32(step.to_bytes(4, "little"), pass_number)
