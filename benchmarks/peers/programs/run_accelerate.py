"""Accelerate: the loader has the global batch and is split."""

from __future__ import annotations

import workload
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def main() -> None:
    job = workload.Job(workload.parser(__doc__).parse_args())
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True)
    )
    model, optimizer, loader = accelerator.prepare(
        job.model, job.optimizer(), job.loader(job.batch)
    )
    for x, y in job.turns(loader):
        loss = workload.loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.note(loss)
    job.finish(accelerator.process_index, accelerator.num_processes, "accelerate")
    accelerator.end_training()
    workload.leave()


if __name__ == "__main__":
    main()
