"""What workers of a pipeline would measure if all went by given times: made of simulated steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.comm.schedule import LinkSpeed
from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import StageTimes, simulate_schedule


def measured(
    name: str,
    forwards: Sequence[float],
    *,
    layers: Sequence[int] | None = None,
    ranks: int | None = None,
    micro_batches: int = 8,
    steps: int = 3,
    ahead: Sequence[int] = (),
    transfer: float = 0.0,
    layer_seconds: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """What each worker has measured: stages of these forwards (seconds), whose backwards take twice
    as long, of so many `layers` each.

    `ahead`: by how many nanoseconds each worker's clock is. `transfer`: the seconds of a message.
    """
    stages = len(forwards)
    ranks = ranks or stages
    schedule = make_schedule(name, ranks, micro_batches, stages // ranks)
    times = StageTimes(
        forwards,
        [2 * each for each in forwards],
        sends=[transfer] * (stages - 1),
        links=[LinkSpeed(0.0, 1.0)] * (stages - 1),
    )
    found = simulate_schedule(schedule, times)
    counts = list(layers or [1] * stages)
    bounds = [sum(counts[:stage]) for stage in range(stages + 1)]
    each = layer_seconds or [
        forward / count
        for forward, count in zip(forwards, counts, strict=True)
        for _ in range(count)
    ]
    workers = []
    for rank, row in enumerate(found.rows):
        # a worker waits from the end of one action to the beginning of the next
        begins = [0.0, *(span.end for span in row)]
        shift = ahead[rank] if ahead else 0
        actions = [
            [round(1e9 * moment) + shift for moment in (began, span.start, span.end)]
            for began, span in zip(begins, row, strict=False)
        ]
        held = schedule.stages_of_rank(rank)
        workers.append(
            {
                "schedule": name,
                "chunks": stages // ranks if name == "interleaved" else None,
                "layers": [f"layer{number}" for number in range(bounds[-1])],
                "bounds": bounds,
                "layer_seconds": {
                    layer: each[layer]
                    for stage in held
                    for layer in range(bounds[stage], bounds[stage + 1])
                },
                "kept": dict.fromkeys(held, 100),
                "steps": [[number, micro_batches, actions] for number in range(steps)],
            }
        )
    return workers
