"""Horovod's DistributedOptimizer, over its own Gloo."""

from __future__ import annotations

import horovod.torch as hvd
import workload


def main() -> None:
    job = workload.Job(workload.parser(__doc__).parse_args())
    hvd.init()
    optimizer = hvd.DistributedOptimizer(
        job.optimizer(), named_parameters=job.model.named_parameters()
    )
    hvd.broadcast_parameters(job.model.state_dict(), root_rank=0)
    job.train(job.model, optimizer, job.dealt(hvd.rank(), hvd.size()))
    job.finish(hvd.rank(), hvd.size(), "horovod")
    hvd.shutdown()


if __name__ == "__main__":
    main()
