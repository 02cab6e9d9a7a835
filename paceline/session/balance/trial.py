"""Micro-batches that fit: before a loader's first epoch of training each worker tries how many samples its memory stands.

forward and backward on 1, 2, 4 ... samples, each worker by itself    ->  the workers tell each other how many fit
a global batch is cut into as few micro-batches as let each part fit      the same number on all workers

Gradients, buffers and random numbers are left as they are, hooks of parameters aren't called, and nothing is exchanged. What stands for
the loss, which isn't known yet, is the mean of the squares of what the model gives.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.spec import LoaderSpec
from paceline.errors import UsageError
from paceline.formatting import sized
from paceline.parallel.batchnorm import desynchronise
from paceline.parallel.containers import tree_leaves
from paceline.parallel.gradient_hooks import without_gradient_hooks
from paceline.parallel.initialise import kept_randomness
from paceline.session.axes import RunAxes
from paceline.session.balance.memory import COPIES, AllocationMeter, is_out_of_memory, largest, limit_of, nbytes
from paceline.session.loop.ghost import buffers, put_back
from paceline.session.prepare.device import mover

INSTEAD = "say accumulate=k, the number of micro-batches"


@dataclass(frozen=True)
class MemoryTrial:
    """Finds out how many samples fit. `synchronous`: the models whose BatchNorm layers exchange, as `synchronise` lets them."""

    models: Sequence[tuple[str, nn.Module]]
    optimizers: Sequence[Optimizer]
    device: torch.device
    axes: RunAxes
    synchronous: list[nn.Module]
    synchronise: Callable[[list[nn.Module]], None]

    def check(self, loader: DataLoader[Any], options: Mapping[str, Any], *, lockstep: bool, tables: bool) -> None:
        """Raise `UsageError` where it can't be tried how many samples of a loader fit, and these options ask for it."""
        if options["accumulate"] != "auto":
            return
        if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__") or loader.batch_size is None:
            raise UsageError(f"accumulate='auto' tries samples of a data set with indices, in batches, and this loader has none: {INSTEAD}")
        if options["cost"] is not None:
            raise UsageError(f"accumulate='auto' counts samples that are alike, and with cost= they differ: {INSTEAD}")
        if not lockstep:
            raise UsageError(f"accumulate='auto' is for workers in lockstep, and with staleness or backup_workers they are not: {INSTEAD}")
        if self.axes.slice.survives:
            raise UsageError(f"accumulate='auto' is tried once, and with --min-workers others may come, or parts grow: {INSTEAD}")
        if tables:
            raise UsageError(f"accumulate='auto' would pull rows of sparse tables for its tries: {INSTEAD}")
        self.axes.refuse("accumulate='auto'", "say accumulate=k, or micro_batches of a pipeline")

    def __call__(self, terms: LoaderSpec) -> tuple[int, ...]:
        """Return the largest micro-batch of each worker. Collective.

        Raises `UsageError` on all workers where one has no memory for a single sample, or a model can't be tried.
        """
        if len(self.models) != 1:
            raise UsageError(f"accumulate='auto' tries one model on a loader's samples, and {len(self.models)} are there: {INSTEAD}")
        for name, module in self.models[0][1].named_modules():
            if any(not _is_known(hook) for hooks in _hooks(module) for hook in hooks.values()):
                raise UsageError(f"accumulate='auto' would call the hooks of module {name or 'model'!r} for its tries: {INSTEAD}")
        samples, limit = self._search(terms)
        answers = [struct.unpack("<qq", body) for body in terms.agreement.meet("micro-batches", struct.pack("<qq", samples, limit))]
        for rank, (most, left) in enumerate(answers):
            if most < 1:
                raise UsageError(
                    f"rank {rank} has no memory for one sample: {sized(max(0, left))} are left for it beside the model's and the "
                    "optimizer's state; take a smaller model or smaller samples, cut the model, or start fewer workers on that host"
                )
        found = tuple(most for most, _ in answers)
        self._announce(terms, found)
        return found

    def _announce(self, terms: LoaderSpec, found: tuple[int, ...]) -> None:
        batch = terms.loader.batch_size or 1
        count = terms.fewest(batch, found)
        if count > 1:
            most = ", ".join(map(str, found)) if len(set(found)) > 1 else str(found[0])
            terms.announce(f"memory stands {most} samples at a time on each worker: a batch of {batch} is taken in {count} micro-batches")

    def _search(self, terms: LoaderSpec) -> tuple[int, int]:
        """Return how many samples fit here, and the bytes that there are for them."""
        ((_, model),) = self.models
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        later = [p for p in trained if not any(p in optimizer.state for optimizer in self.optimizers)]
        fixed = nbytes(trained)
        reserve = COPIES * nbytes(later) + (0 if terms.alone else fixed)  # and what gradients are exchanged in
        limit = self.limit() - reserve
        batch = terms.loader.batch_size or 1
        share = max(1, terms.shares(batch)[terms.rank])
        first = 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1

        def attempt(samples: int) -> int | None:
            return self._attempt(model, trained, self._rows(terms, samples), fixed)

        with self._alone(), kept_randomness(), _uncompiled(), without_gradient_hooks(trained):
            kept = buffers([model])
            try:
                found, _ = largest(attempt, share=share, most=batch, limit=limit, fixed=fixed, first=first)
            finally:
                put_back(kept)
        return found, limit

    def limit(self) -> int:
        """Return the bytes that this worker may take: it shares its host with others."""
        return limit_of(self.device, len(self.axes.cluster().of(self.axes.everyone.group.rank).ranks))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let BatchNorm layers take the statistics of what this worker gives them."""
        for model in self.synchronous:
            desynchronise(model)
        try:
            yield
        finally:
            self.synchronise(self.synchronous)

    def _rows(self, terms: LoaderSpec, samples: int) -> Callable[[], Any]:
        """Return what makes a batch of so many samples, of which each worker takes others."""
        loader, dataset = terms.loader, terms.loader.dataset
        count = len(dataset)  # type: ignore[arg-type]
        start = terms.rank * samples

        def make() -> Any:
            move = mover(self.device)
            batch = loader.collate_fn([dataset[(start + number) % count] for number in range(samples)])
            return batch if move is None else move(batch)

        return make

    def _attempt(self, model: nn.Module, trained: Sequence[Tensor], rows: Callable[[], Any], fixed: int) -> int | None:
        """Go forward and back, and return the bytes that it took; None where memory ran out."""
        try:
            with torch.enable_grad(), _measured(model, self.device) as meter:
                return _pass(model, trained, rows, fixed, meter)
        except Exception as error:  # a script's own model may raise anything
            if not is_out_of_memory(error):
                if isinstance(error, UsageError):
                    raise
                raise UsageError(
                    "accumulate='auto' tries the model on all but the last of what the loader gives, and it raised "
                    f"{type(error).__name__}: {error}; {INSTEAD}"
                ) from error
        if self.device.type == "cuda":  # what the failed try has held is freed with its error
            torch.cuda.empty_cache()
        return None


def _hooks(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    found: Any = [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]
    return cast(list[dict[int, Callable[..., Any]]], found)


def _is_known(hook: Any) -> bool:
    """Whether a hook of a module is torch's (of weight norm and the like) or this library's, and may be called for a try."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None)).partition(".")[0] in ("torch", "paceline")


def _uncompiled() -> AbstractContextManager[None]:
    """Run compiled models as they are written: compiling them for sizes that don't come again would take long."""
    stance: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    return cast(AbstractContextManager[None], stance)


class _DeviceMeter:
    """The bytes of a GPU that are taken beside what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


@contextmanager
def _measured(model: nn.Module, device: torch.device) -> Iterator[AllocationMeter | _DeviceMeter]:
    if device.type == "cuda":
        yield _DeviceMeter(device)
        return
    with AllocationMeter([model]) as meter:
        yield meter


def _pass(model: nn.Module, trained: Sequence[Tensor], rows: Callable[[], Any], fixed: int, meter: AllocationMeter | _DeviceMeter) -> int:
    """Go forward and back, and return the bytes that it took: what the forward leaves counts as if it stayed beside all gradients."""
    batch = rows()
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*(batch[:-1] if isinstance(batch, tuple | list) and len(batch) > 1 else [batch]))
    roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        raise UsageError(f"accumulate='auto' goes back from what the model gives, and none of that has a gradient: {INSTEAD}")
    loss = torch.stack([leaf.float().square().mean() for leaf in roots]).sum()
    forward = meter.peak
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    del gradients
    return max(meter.peak, forward + fixed)
