"""Checks that a loader can be dealt with the options that a script gives."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from paceline.data.spec import Loss, Weigh
from paceline.errors import DataError
from paceline.formatting import describe_unknown_choice


def check_loader(loader: DataLoader[Any], loss: str, weigh: Weigh | None) -> None:
    """Raise `DataError` for a loader that can't be dealt, or not with these options."""
    kind = type(loader)
    # Private: breaks if torch's DataLoader no longer makes its iterator by `_get_iterator`.
    if (
        not isinstance(loader, DataLoader)
        or kind.__iter__ is not DataLoader.__iter__
        or kind._get_iterator is not DataLoader._get_iterator
    ):
        raise DataError(
            f"a {kind.__qualname__} can't be dealt, as it has its own way of reading: "
            "give a plain torch.utils.data.DataLoader"
        )
    if not loader.in_order:
        raise DataError(
            "in_order=False can't be honoured: all workers need the same batches in the same "
            "order; leave it out"
        )
    check_options(loss, weigh)


def check_cost(loader: DataLoader[Any], cost: Any, *, lockstep: bool) -> None:
    """Raise `DataError` for a loader whose samples can't be dealt by cost."""
    if not callable(cost):
        raise DataError(
            f"cost is {cost!r}: it must be a function of a sample, such as cost=lambda sample: "
            "len(sample[0])"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            "cost= needs samples before they are dealt, and the samples of a stream aren't known "
            "before they are read: leave it out, let the "
            "stream give samples that are alike, or use a data set with indices"
        )
    if loader.batch_sampler is None:
        raise DataError(
            "cost= deals the samples of a batch, and each item of this data set is a whole batch "
            "(batch_size=None): give the loader a batch size, or leave cost= out"
        )
    if not lockstep:
        raise DataError(
            "cost= evens out the time that workers in lockstep wait for each other, and with "
            "staleness, backup_workers or a quorum each takes samples when it is ready: leave it "
            "out"
        )


def check_options(loss: str, weigh: Weigh | None) -> None:
    """Raise `DataError` for options with which no loader can be dealt."""
    if wrong := describe_unknown_choice("loss", loss, Loss):
        raise DataError(f"{wrong} (as the loss function's reduction is)")
    if loss == "sum" and weigh is not None:
        raise DataError(
            "weigh is for losses that are a mean, and loss is 'sum': leave one of them out"
        )


def check_speeds(shard: str | None, *, lockstep: bool) -> None:
    """Raise `DataError` if a loader can't be dealt with shares by speed."""
    if shard == "mine":
        raise DataError(
            "shares='auto' deals batches by speed, and with shard='mine' the stream deals them: "
            "leave out one of them, or give the stream more samples on faster workers"
        )
    if not lockstep:
        raise DataError(
            "shares='auto' is for workers in lockstep, and with staleness, backup_workers or a "
            "quorum each takes its next samples when it is ready, "
            "so a fast one takes more by itself: leave out shares"
        )
