"""hivemind's averager, with gradients in it: every step all workers look for each other and
average. torchrun only lets them meet.
"""

from __future__ import annotations

from datetime import timedelta

import hivemind
import torch
import torch.distributed as dist
import workload
from hivemind.averaging import DecentralizedAverager

# seconds in which a group is formed, each step; with less, groups are often incomplete
MATCHMAKING = 0.5


def meet(address: str) -> hivemind.DHT:
    """The hash table of all workers; the first one's address goes around."""
    place = {"host_maddrs": [f"/ip4/{address}/tcp/0"], "start": True}
    first = hivemind.DHT(**place) if dist.get_rank() == 0 else None
    peers = [None if first is None else [str(a) for a in first.get_visible_maddrs()]]
    dist.broadcast_object_list(peers, src=0)
    return first or hivemind.DHT(initial_peers=peers[0], **place)


def main() -> None:
    arguments = workload.parser(__doc__)
    arguments.add_argument("--address", required=True, help="where others reach this host")
    options = arguments.parse_args()
    job = workload.Job(options)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    dht = meet(options.address)
    parameters = list(job.model.parameters())
    averager = DecentralizedAverager(
        [torch.zeros_like(p) for p in parameters],
        dht,
        prefix="gradients",
        target_group_size=size,
        min_group_size=size,
        initial_group_bits="",
        min_matchmaking_time=MATCHMAKING,
        request_timeout=MATCHMAKING / 2,
        start=True,
    )

    def average() -> None:
        """Gradients into the averager, and their means back."""
        with torch.no_grad(), averager.get_tensors() as tensors:
            for tensor, parameter in zip(tensors, parameters, strict=True):
                tensor.copy_(parameter.grad)
        group = averager.step(timeout=300)
        if group is None or len(group) != size:
            raise SystemExit(
                f"hivemind averaged {0 if group is None else len(group)} of {size} workers"
            )
        with torch.no_grad(), averager.get_tensors() as tensors:
            for tensor, parameter in zip(tensors, parameters, strict=True):
                parameter.grad = tensor.clone()

    dist.barrier()
    job.train(job.model, job.optimizer(), job.dealt(rank, size), after=average)
    job.finish(rank, size, "hivemind")
    dist.barrier()
    averager.shutdown()
    dht.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
