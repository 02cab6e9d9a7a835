"""The loaders that `PacelineAccelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.state import GradientState

from paceline.bridges.accelerate.batches import GlobalBatches
from paceline.bridges.accelerate.windows import AccumulationWindows
from paceline.data.loader import ShareLoader, Turn
from paceline.errors import UsageError


class PacelineDataLoader:
    """An iterable over this process's part of each global batch, as Accelerate uses loaders.

    No sample is given twice. If the last global batch has too few samples, a process without any
    gets the first one, whose gradient and rows don't count.

    Attributes:
        share: The loader of the run.
        windows: Makes accumulated batches one turn of the run.
        iteration: Number of the epoch.
        end_of_dataloader: Whether the present batch is the last one. Always False for streams, as
            their end isn't known before it comes.
        remainder: Number of repeated samples that a gathered batch has: none.

    Args:
        share: The loader of the run.
        windows: Makes accumulated batches one turn of the run.
        is_training: Returns whether a loop that begins now is a training.
    """

    def __init__(
        self, share: ShareLoader, windows: AccumulationWindows, is_training: Callable[[], bool]
    ) -> None:
        self.share, self.windows, self._is_training = share, windows, is_training
        self.gradient_state = GradientState()
        self.iteration, self.end_of_dataloader, self.remainder = 0, False, 0
        sampler = share.terms.loader.batch_sampler
        self._skips_all = False  # the next loop gives no batches
        self._batches = sampler if isinstance(sampler, GlobalBatches) else None

    def __getattr__(self, name: str) -> Any:
        # Unpickling and copying ask for attributes before `share` is set.
        if name == "share":
            raise AttributeError(name)
        return getattr(self.share, name)

    def __len__(self) -> int:
        return len(self.share) if self._batches is None else self._batches.count_batches(0)

    @property
    def turn(self) -> Turn | None:
        """This process's part of the present batch."""
        return self.share.turn

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch (batches, if the script has a batch sampler of its own)."""
        if self._batches is not None:
            return self._batches.group
        return int(self.share.terms.loader.batch_size or 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that begins next."""
        self.iteration = epoch
        if self._batches is not None:
            self._batches.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(self.iteration)
        batches = self._batches
        if batches is not None and batches.offset and not len(batches):
            self._pass_over_epoch(batches)
            if self._skips_all:
                self._skips_all = False
                self.iteration += 1
                return
        self.gradient_state._add_dataloader(self)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._is_training()):
                parts = iter(self.share)
            for part in parts:
                turn = self.share.turn
                self.end_of_dataloader = (
                    batches is not None and turn is not None and turn.index + 1 >= len(batches)
                )
                yield part
        finally:
            self.end_of_dataloader = False
            self.gradient_state._remove_dataloader(self)
            if batches is not None:
                batches.begin_at(0)
        self.iteration += 1

    def _pass_over_epoch(self, batches: GlobalBatches) -> None:
        """End an epoch whose samples are all used, so that samplers draw the next order."""
        # A run takes no epoch without a batch, so the last one is read again, and isn't used.
        batches.begin_at(max(0, len(batches.sampler) - batches.group))
        with torch.no_grad():
            for _ in self.share:
                pass
        batches.begin_at(0)

    def skip_batches(self, count: int) -> None:
        """Begin the next loop at batch `count` of the epoch.

        Raises:
            UsageError: The loader reads a stream.
        """
        if self._batches is None:
            raise UsageError(
                "skip_first_batches can't skip batches of a stream, and need not: load_state sets "
                "its position; iterate over the loader itself"
            )
        if count:
            self._begin_at(count * self._batches.group)
            self._skips_all = not len(self._batches)

    def state_dict(self) -> dict[str, int]:
        """Position in the epoch; inside of a loop the present batch counts as done."""
        if self._batches is None:
            return {"iteration": self.iteration, "position": 0, "group": self.total_batch_size}
        position, turn = self._batches.offset, self.share.turn
        if self.share.under_way and turn is not None:
            position += (turn.index + 1) * self._batches.group
        over = position > 0 and not self._batches.count_batches(position)
        group = self._batches.group
        return {"iteration": self.iteration + over, "position": position, "group": group}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position, which may come from another number of processes."""
        if self._batches is not None:
            self._begin_at(state["position"])
        elif state["group"] != self.total_batch_size:
            raise UsageError(
                f"a stream was saved with global batches of {state['group']} samples, and they "
                f"have {self.total_batch_size} now: resume with as many processes as before, "
                "or use split_batches=True"
            )
        self.iteration = state["iteration"]

    def _begin_at(self, position: int) -> None:
        """Begin the next loop at a unit of the epoch, whose order stays the same."""
        # Batches may have another size than before, so the epoch begins anew with this unit.
        assert self._batches is not None
        begun = self.share.state_dict()
        self.share.load_state_dict({**begun, "step": 0, "check": 0})
        self._batches.begin_at(position)
        self._skips_all = False


class SkippedDataLoader:
    """A loader that begins its next loop at a later batch.

    Args:
        loader: The loader.
        count: Batches that are left out, from the beginning of the epoch.
    """

    def __init__(self, loader: PacelineDataLoader, count: int) -> None:
        self._loader, self._count = loader, count

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._count)

    def __iter__(self) -> Iterator[Any]:
        self._loader.skip_batches(self._count)
        return iter(self._loader)
