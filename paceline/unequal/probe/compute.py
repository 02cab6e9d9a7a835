"""Measures the speed of a worker's device: products of matrices, and copies in memory.

A control group with a quota lets a worker compute for a part of each period of 100 ms, and then
holds it until the next period. Products take a few milliseconds, so these gaps are visible, and
only whole periods are counted:

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
SHORTEST_PRODUCT: Final = 2e-3  # seconds that a product takes, at least
COPIED: Final = 1 << 26  # bytes of a copied tensor: more than caches hold
LEAST: Final = 5  # repetitions of an action, at least
PARTS: Final = 5  # parts of a measurement without gaps: the median of their rates counts
GAP: Final = 6e-3  # seconds above the typical time that make a gap, at least


class MeasuredRate(NamedTuple):
    """A rate per second, and its spread: the interquartile range of times by their median."""

    rate: float
    spread: float
    attended: float  # processor seconds per second


def choose_matrix_length(device: torch.device, dtype: str) -> int:
    """Choose the smallest matrices whose product takes long enough to be timed."""
    for length in SIDES:
        multiply = _make_product(device, dtype, length)
        # The fastest of three: the first product also loads libraries.
        if min(_time_once(multiply, device) for _ in range(3)) >= SHORTEST_PRODUCT:
            return length
    return SIDES[-1]


def measure_products(
    device: torch.device, dtype: str, length: int, seconds: float
) -> tuple[DeviceSpeed, float]:
    """Measure products of square matrices.

    Args:
        device: Device that multiplies.
        dtype: Name of a dtype, such as "float32".
        length: Rows and columns of a matrix.
        seconds: Duration of the measurement.

    Returns:
        The speed in floating-point operations per second, and the processor seconds per second.
    """
    measured = repeat_action(_make_product(device, dtype, length), device, seconds)
    return DeviceSpeed(dtype, 2.0 * length**3 * measured.rate, measured.spread), measured.attended


def measure_copies(pair: tuple[Tensor, Tensor], seconds: float) -> float:
    """Measure copies from one tensor to the other, in bytes per second read and written."""
    source, target = pair
    copies = repeat_action(lambda: target.copy_(source), source.device, seconds)
    return 2.0 * source.nbytes * copies.rate


def make_copy_pair(device: torch.device) -> tuple[Tensor, Tensor]:
    """Make two tensors for `measure_copies`, larger than caches if the memory allows it."""
    # At most an eighth of the free memory each, in whole elements of 4 bytes.
    nbytes = min(COPIED, max(1 << 20, find_free_memory(device).free // 8) // 4 * 4)
    return torch.zeros(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)


def find_free_memory(device: torch.device) -> machine.MemorySize:
    """Measure the total and the free memory of the device, in bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return machine.MemorySize(total, free)
    return machine.measure_memory()


def repeat_action(act: Callable[[], object], device: torch.device, seconds: float) -> MeasuredRate:
    """Repeat an action for a number of seconds, and measure its rate.

    Args:
        act: Action; it may only queue work on the device.
        device: Device that is waited for after each action.
        seconds: Duration, at least; the action is repeated at least LEAST times.
    """
    # The first action isn't timed: it loads kernels and fills caches.
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
    """Compute the rate per second of a repeated action, and the spread of its times.

    If there are gaps, the rate counts from the end of the first gap to the end of the last one,
    provided that this is most of the time. Otherwise it is the median rate of PARTS parts.

    Args:
        ends: Time in seconds at which the first action began, then those at which each one ended.
    """
    times = [after - before for before, after in pairwise(ends)]
    typical = statistics.median(times)
    gaps = [index for index, each in enumerate(times) if each > max(3 * typical, typical + GAP)]
    usual = sorted(each for each in times if each <= max(3 * typical, typical + GAP))
    spread = (usual[-1 - len(usual) // 4] - usual[len(usual) // 4]) / typical

    # A quota makes gaps at equal distances: from gap to gap are whole periods.
    if (
        len(gaps) > 1
        and (counted := ends[gaps[-1] + 1] - ends[gaps[0] + 1]) >= (ends[-1] - ends[0]) / 2
    ):
        return (gaps[-1] - gaps[0]) / counted, spread

    # The median of the parts leaves out a short disturbance.
    bounds = [round(part * len(times) / PARTS) for part in range(PARTS + 1)]
    rates = [(stop - start) / (ends[stop] - ends[start]) for start, stop in pairwise(bounds)]
    return statistics.median(rates), spread


def _make_product(device: torch.device, dtype: str, length: int) -> Callable[[], Tensor]:
    """Make the action that multiplies two matrices into a third."""
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
