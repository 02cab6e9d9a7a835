"""The largest micro-batch that fits into a worker's memory, found by trying one sample, two, four and so on.

samples    1     2     4     8    12        the share of this worker is 12, the limit 60 MB
MB         7    10    16    28    40  ->    5 MB of gradients, 3 MB a sample: 18 fit

What the tries before say decides whether the next is made: a process that takes too much memory is killed, on a CPU. It decides too what
would fit beyond this worker's share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster import machine
from paceline.parallel.containers import tree_leaves

PART = 0.8  # of what is free: kernels take some memory that nobody sees, and so do others
COPIES = 2  # of what is trained: an optimizer keeps as much from its first step on, at most
CLOSE = 8  # where memory ends is found to an eighth


class Tried(NamedTuple):
    """A try: so many samples took so many bytes, beside what was there before."""

    samples: int
    nbytes: int


Attempt = Callable[[int], "int | None"]  # samples -> bytes that they took; None where memory ran out


def predict(tries: Sequence[Tried], samples: int, fixed: int) -> int:
    """Return the bytes that more samples will take than the largest of `tries`; `fixed` are those that don't depend on samples."""
    known = [Tried(0, min(fixed, tries[0].nbytes)), *tries]
    growth = max((two.nbytes - one.nbytes) / (two.samples - one.samples) for one, two in pairwise(known))
    return round(known[-1].nbytes + max(growth, 0.0) * (samples - known[-1].samples))


def largest(attempt: Attempt, *, share: int, most: int, limit: int, fixed: int, first: int = 1) -> tuple[int, list[Tried]]:
    """Return how many samples fit into `limit` bytes, at most `most`, and the tries; 0 where not even one fits.

    The smallest try is of `first` samples, where a model can't do with fewer by itself, and more than these and `share` are never tried.
    Where `first` samples don't fit, fewer are predicted, as a model may get them where other workers have samples too; a try that ran out
    of memory says nothing of fewer, and one is taken to fit.
    """
    tries: list[Tried] = []
    share = max(first, share)
    low, high = 0, share + 1  # what fits, and what doesn't or isn't wanted
    failed: list[Tried] = []  # above the limit

    def fits(samples: int) -> bool:
        if tries and predict(tries, samples, fixed) > limit:
            return False
        nbytes = attempt(samples)
        if nbytes is None or nbytes > limit:
            failed.extend([] if nbytes is None else [Tried(samples, nbytes)])
            return False
        tries.append(Tried(samples, nbytes))
        return True

    samples = first
    while samples < high:
        if fits(samples):
            low, samples = samples, max(samples + 1, min(2 * samples, share))
        else:
            high = samples
    if not tries and first > 1:
        fewer = [one for one in range(1, first) if predict(failed, one, fixed) <= limit] if failed else [1]
        return max(fewer, default=0), tries
    while low and high - low > 1 and (high - low) * CLOSE > low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < share:
        return low, tries
    grown = predict(tries, share + 1, fixed) - tries[-1].nbytes
    beyond = most if grown <= 0 else share + max(0, limit - tries[-1].nbytes) // grown
    return min(most, beyond), tries


def limit_of(device: torch.device, workers: int) -> int:
    """Return the bytes that each of `workers` that share a host may take: a part of what is free, on a GPU of what its own has free."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return round(PART * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)))
    return round(PART * machine.memory_size().free / workers)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the elements of these tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is entered, by operations of this thread: those held now, and the peak."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        held = (x for model in models for x in (*model.parameters(), *model.buffers()))
        self._known = {x.untyped_storage()._cdata for x in held if x.layout is torch.strided}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.layout is torch.strided:
                self._note(x)
        return out

    def _note(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size).atexit = False

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory has run out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "can't allocate memory" in str(error))
