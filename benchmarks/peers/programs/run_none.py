"""No peer: one process that trains on the whole global batch; what all others are checked against.

With --save FILE it also writes its weights, and trains once more as a worker would that never
exchanges anything: a check that can't tell such a worker from a right one is worth nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
import workload


def main() -> None:
    arguments = workload.parser(__doc__)
    arguments.add_argument("--save", type=Path, help="where the weights go")
    options = arguments.parse_args()
    job = workload.Job(options)
    job.train(job.model, job.optimizer(), job.loader(job.batch))
    if options.save is None:
        job.finish(0, 1)
        return
    weights = workload.flat(job.model)
    assert job.warmed is not None
    torch.save({"weights": weights, "warmed": job.warmed}, options.save)
    lone = workload.Job(options)
    lone.train(lone.model, lone.optimizer(), lone.dealt(0, options.workers))
    moved = workload.distance(workload.flat(workload.build(options.model, options.seed)), weights)
    assert lone.warmed is not None
    alone_warmed = workload.distance(lone.warmed, job.warmed)
    job.finish(
        0,
        1,
        moved=moved,
        alone=workload.distance(workload.flat(lone.model), weights),
        alone_warmed=alone_warmed,
    )


if __name__ == "__main__":
    main()
