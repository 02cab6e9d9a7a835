"""torchft: every worker is a replica group of its own, under a torchrun of its own that starts it
again, beside one lighthouse.

The loop is that of torchft's train_ddp.py, with its DistributedSampler; a batch's place comes from
the manager's step, so that a step that wasn't committed is tried again with the same samples, and a
replica that was healed goes on where the others are.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import task
import torch
import torch.distributed as dist
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


class Parallel(DistributedDataParallel):  # type: ignore[misc]
    """torchft's, whose hook ends in an AssertionError (0.2.0) when Gloo's wait raises: every
    survivor would end with the worker that died.

    As in torchft's, the hook waits for the exchange; the manager knows of one that failed, and
    doesn't commit the step.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def wait_for_all(out: Path, workers: int) -> None:
    """At the very start: until all replicas are there, or the first two would begin and what the
    others should have had would be lost.
    """
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while len(list(out.glob("turns-*"))) < workers:
            time.sleep(0.01)


def main() -> None:
    parser = task.options(__doc__)
    parser.add_argument("--replica", type=int, required=True, help="number of this replica group")
    parser.add_argument(
        "--exchange-timeout", type=float, required=True, help="seconds that Gloo waits for another"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        help="seconds that the manager waits for a quorum and for all else",
    )
    asked = parser.parse_args()
    model, inner = task.build(asked.model)
    data = task.Numbered(asked.steps * asked.share * asked.workers)
    sampler = DistributedSampler(
        data, asked.replica, asked.workers, group_rank=0, num_replicas=1, shuffle=False
    )
    mine = list(sampler)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    patience = timedelta(seconds=asked.patience)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=asked.exchange_timeout)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=patience,
        quorum_timeout=patience,
        replica_id=f"replica-{asked.replica}",
        hostname="127.0.0.1",
        init_sync=False,  # all begin with the same weights
    )
    parallel = Parallel(manager, model, forward_sync_buffers=False, gradient_as_bucket_view=True)
    optimizer = Optimizer(manager, inner)
    journal = task.Journal(asked.out)
    wait_for_all(asked.out, asked.workers)
    while (step := manager.current_step()) < asked.steps:
        rows = [data[index] for index in mine[step * asked.share : (step + 1) * asked.share]]
        ids, x, y = (torch.stack(part) for part in zip(*rows, strict=True))
        journal.began(asked.replica, step, ids.tolist())
        optimizer.zero_grad()  # asks for the quorum of this step
        task.loss_of(parallel(x), y).backward()
        optimizer.step()
        part = manager.is_participating()
        taken = part and manager.current_step() > step
        journal.ended(manager._quorum_id, manager.num_participants(), taken=taken, counted=part)
    journal.finish(model)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
