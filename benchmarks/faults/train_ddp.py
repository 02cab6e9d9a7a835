"""DDP under `torchrun --max-restarts`: a checkpoint every so many steps, from which everybody
begins again after a fault.

The first worker writes the checkpoint beside the old one and renames it; the others don't wait for
it. Everybody reads it at the start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def save(path: Path, state: dict[str, Any]) -> None:
    """Put a checkpoint where the last one is, whole."""
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main() -> None:
    parser = task.options(__doc__)
    parser.add_argument(
        "--every", type=int, required=True, help="steps from one checkpoint to the next"
    )
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt, path = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), asked.out / "checkpoint.pt"
    module, optimizer = task.build(asked.model)
    step = 0
    if path.exists():
        kept = torch.load(path, weights_only=True)
        module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    model = DistributedDataParallel(
        module, forward_sync_buffers=False, gradient_as_bucket_view=True, static_graph=True
    )
    batch = asked.share * size
    rest = Subset(task.Numbered(asked.steps * batch), range(step * batch, asked.steps * batch))
    sampler: DistributedSampler[task.Batch] = DistributedSampler(rest, shuffle=False)
    journal = task.Journal(asked.out)
    for ids, x, y in DataLoader(rest, batch_size=asked.share, sampler=sampler):
        journal.began(rank, step, ids.tolist(), attempt)
        optimizer.zero_grad()
        task.loss_of(model(x), y).backward()
        optimizer.step()
        journal.ended(attempt, size)
        step += 1
        if rank == 0 and step % asked.every == 0:
            save(
                path,
                {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            )
    journal.finish(module)
    dist.barrier()
    sys.stdout.flush()
    # Python's end may wait for ever for Gloo's thread (see benchmarks/peers/programs/workload.py)
    os._exit(0)


if __name__ == "__main__":
    main()
