"""Measures what the device of a worker computes: products of matrices, and copies in memory.

A control group with a quota lets a worker compute for a part of each period of 100 ms, and holds it
until the next. Products take some milliseconds, so that these gaps are seen, and whole periods are
counted:

    products  |||||||.........||||||.........||||||.........|||
                             [-----counted-----------------]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

from paceline.cluster import machine
from paceline.cluster.topology import DeviceSpeed

SIDES: Final = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # of square matrices
SHORTEST_PRODUCT: Final = 2e-3  # that a product takes at least
COPIED: Final = 1 << 26  # bytes of what is copied: more than caches hold
LEAST: Final = 5  # times that something is done at least
PARTS: Final = 5  # of a measurement without gaps: the middle one counts
GAP: Final = 6e-3  # seconds more than is typical


class MeasuredRate(NamedTuple):
    """A rate per second, and its spread: the middle half of the times as a part of the median."""

    rate: float
    spread: float
    attended: float  # seconds of a processor, for each second


def choose_matrix_length(device: torch.device, dtype: str) -> int:
    """Smallest of the possible matrices whose product takes long enough to be timed."""
    for length in SIDES:
        multiply = _make_product(device, dtype, length)
        if min(_time_once(multiply, device) for _ in range(3)) >= SHORTEST_PRODUCT:
            return length
    return SIDES[-1]


def measure_products(
    device: torch.device, dtype: str, length: int, seconds: float
) -> tuple[DeviceSpeed, float]:
    """Measure products of matrices of this length for a number of seconds.

    Also returns the processor seconds per second.
    """
    found = repeat_action(_make_product(device, dtype, length), device, seconds)
    return DeviceSpeed(dtype, 2.0 * length**3 * found.rate, found.spread), found.attended


def measure_copies(pair: tuple[Tensor, Tensor], seconds: float) -> float:
    """Measure copies from one tensor to the other, in bytes a second that are read or written."""
    source, target = pair
    return (
        2.0
        * source.nbytes
        * repeat_action(lambda: target.copy_(source), source.device, seconds).rate
    )


def make_copy_pair(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors on the device for `measure_copies`, larger than caches if there is room."""
    nbytes = min(COPIED, max(1 << 20, find_free_memory(device).free // 8) // 4 * 4)
    return torch.zeros(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)


def find_free_memory(device: torch.device) -> machine.MemorySize:
    """Return the memory of the device, in all and free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return machine.MemorySize(total, free)
    return machine.measure_memory()


def repeat_action(act: Callable[[], object], device: torch.device, seconds: float) -> MeasuredRate:
    """Do something again and again for so long."""
    act()
    _wait_for_device(device)
    used, ends = time.process_time(), [time.perf_counter()]
    while len(ends) <= LEAST or ends[-1] < ends[0] + seconds:
        act()
        _wait_for_device(device)
        ends.append(time.perf_counter())
    used = time.process_time() - used
    rate, spread = compute_steady_rate(ends)
    return MeasuredRate(rate, spread, used / (ends[-1] - ends[0]))


def compute_steady_rate(ends: Sequence[float]) -> tuple[float, float]:
    """Return the rate (in a second) and the spread of something that began at the first of these
    times, and ended at each of the others.

    With gaps, from the end of the first to the end of the last, if that is most of the time; else
    the middle one of some parts.
    """
    times = [after - before for before, after in pairwise(ends)]
    typical = statistics.median(times)
    gaps = [index for index, each in enumerate(times) if each > max(3 * typical, typical + GAP)]
    usual = sorted(each for each in times if each <= max(3 * typical, typical + GAP))
    spread = (usual[-1 - len(usual) // 4] - usual[len(usual) // 4]) / typical
    if (
        len(gaps) > 1
        and (counted := ends[gaps[-1] + 1] - ends[gaps[0] + 1]) >= (ends[-1] - ends[0]) / 2
    ):
        return (gaps[-1] - gaps[0]) / counted, spread
    bounds = [round(part * len(times) / PARTS) for part in range(PARTS + 1)]
    rates = [(stop - start) / (ends[stop] - ends[start]) for start, stop in pairwise(bounds)]
    return statistics.median(rates), spread


def _make_product(device: torch.device, dtype: str, length: int) -> Callable[[], Tensor]:
    kind = getattr(torch, dtype)
    one, other = (
        torch.full((length, length), value, dtype=kind, device=device) for value in (0.5, 0.25)
    )
    out = torch.empty_like(one)
    return lambda: torch.matmul(one, other, out=out)


def _time_once(act: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    act()
    _wait_for_device(device)
    return time.perf_counter() - began


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
