"""MPI by hand, through mpi4py: the gradients are views of one buffer, reduced in place after
backward.
"""

from __future__ import annotations

import torch
import workload
from mpi4py import MPI


def main() -> None:
    job = workload.Job(workload.parser(__doc__).parse_args())
    everybody = MPI.COMM_WORLD
    parameters = list(job.model.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters))
    for parameter, part in zip(
        parameters, buffer.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    memory, optimizer = buffer.numpy(), job.optimizer()
    for x, y in job.turns(job.dealt(everybody.rank, everybody.size)):
        loss = workload.loss_of(job.model(x), y)
        loss.backward()
        everybody.Allreduce(MPI.IN_PLACE, memory)
        buffer /= everybody.size
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        job.note(loss)
    job.finish(everybody.rank, everybody.size, "mpi4py", "openmpi")


if __name__ == "__main__":
    main()
