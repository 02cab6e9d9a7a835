"""Measures all-reduce over all workers, by size, algorithm and kind of memory.

It is the script of `paceline bench collectives`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import paceline as pl
from paceline.bench import collective_options
from paceline.comm import collectives
from paceline.comm.group_protocol import Group, Work
from paceline.comm.schedule import Schedule, build_schedule
from paceline.errors import PacelineError

MIN_CALLS, MAX_CALLS = 5, 2_000  # fewest and most timed calls
AllReduceCall = Callable[[Tensor], Work[Tensor]]  # sums a tensor over all workers, in place


class Timing(NamedTuple):
    """The time of an all-reduce with one algorithm, for one size and kind of memory.

    Attributes:
        nbytes: Size of the tensor.
        via: Name of the algorithm.
        memory: "registered" or "ordinary".
        seconds: Median time of the slowest worker.
    """

    nbytes: int
    via: str
    memory: str
    seconds: float


def make_calls(text: str, group: Group, hosts: list[int]) -> dict[str, AllReduceCall]:
    """Make the functions that sum a tensor, by the names of algorithms.

    Args:
        text: Names with commas. `native` is the group's own all-reduce, the others are schedules.
        group: All workers.
        hosts: Index of the host of each rank.
    """
    calls: dict[str, AllReduceCall] = {}
    for name in collective_options.parse_algorithms(text):
        if name == "native":
            calls[name] = lambda x: group.all_reduce(x, out=x)
        else:
            calls[name] = functools.partial(_follow_schedule, group, build_schedule(name, hosts))
    return calls


def _follow_schedule(group: Group, schedule: Schedule, x: Tensor) -> Work[Tensor]:
    return collectives.all_reduce_by_schedule(group, x, schedule, out=x)


def measure_call(call: AllReduceCall, x: Tensor, group: Group, seconds: float) -> float:
    """Measure the median time of a call on the slowest worker, in seconds. Collective.

    Args:
        call: The call. Its result is checked.
        x: Tensor to sum.
        group: All workers.
        seconds: Time that the measurement may take, approximately.

    Raises:
        PacelineError: The sum is wrong.
    """
    expected = group.size * (group.size + 1) / 2
    first_seconds = time_call(call, x, group)
    if not bool((x == expected).all()):
        raise PacelineError(
            f"worker {group.rank} got {x[x != expected][0].item()} for a sum that is {expected}: "
            "the exchange is broken"
        )
    # All workers have to make the same number of calls, so the slowest one decides.
    slowest_seconds = max(group.gather_objects(first_seconds))
    count = min(MAX_CALLS, max(MIN_CALLS, int(seconds / slowest_seconds)))
    return float(
        max(
            group.gather_objects(statistics.median(time_call(call, x, group) for _ in range(count)))
        )
    )


def time_call(call: AllReduceCall, x: Tensor, group: Group) -> float:
    """Time a call that all workers begin together, in seconds. Collective.

    Args:
        call: The call.
        x: Tensor to sum. It is filled with values that differ between workers.
        group: All workers.
    """
    x.fill_(group.rank + 1)
    group.barrier().wait()
    start = time.perf_counter()
    call(x).wait()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)  # a call on a GPU returns before its work is done
    return time.perf_counter() - start


def format_timings(timings: list[Timing], workers: int) -> str:
    """Format timings as a table. The bandwidth is the size of the tensor divided by the time."""
    lines = [
        f"all-reduce of float32, {workers} workers; median time of the slowest",
        "     size  via               memory        ms       GB/s",
    ]
    for nbytes, via, memory, seconds in timings:
        size = f"{nbytes / 1e6:g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:g} KB"
        lines.append(
            f"{size:>9}  {via:<16}  {memory:<10}  {seconds * 1e3:8.3f}  "
            f"{nbytes / seconds / 1e9:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", default="4KB,256KB,1MB,8MB,33MB", help="sizes of the tensors, with B, KB or MB"
    )
    parser.add_argument("--via", default="native", help="native, or names of schedules")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds to measure each case")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    options = parser.parse_args()
    sizes = collective_options.parse_sizes(options.sizes)

    with pl.start(folder=options.folder, trace="off") as run:
        group = run.group
        calls = make_calls(options.via, group, [0] * group.size)
        timings = []
        for nbytes in sizes:
            tensors = {"ordinary": torch.empty(nbytes // 4, device=run.device)}
            if run.device.type == "cpu":
                tensors["registered"] = group.empty((nbytes // 4,), torch.float32)
            for memory, x in tensors.items():
                for via, call in calls.items():
                    # Schedules don't use registered memory.
                    if via == "native" or memory == "ordinary":
                        timings.append(
                            Timing(
                                nbytes, via, memory, measure_call(call, x, group, options.seconds)
                            )
                        )
        run.print(format_timings(timings, group.size))


if __name__ == "__main__":
    main()
