"""Lightning Fabric, with its strategy "ddp"."""

from __future__ import annotations

import os

import workload
from lightning_fabric import Fabric


def main() -> None:
    job = workload.Job(workload.parser(__doc__).parse_args())
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(
        accelerator="cpu", strategy="ddp", devices=here, num_nodes=job.options.workers // here
    )
    fabric.launch()
    model, optimizer = fabric.setup(job.model, job.optimizer())
    loader = fabric.setup_dataloaders(job.loader(job.share))
    for x, y in job.turns(loader):
        loss = workload.loss_of(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.note(loss)
    job.finish(fabric.global_rank, fabric.world_size, "lightning-fabric")
    workload.leave()


if __name__ == "__main__":
    main()
