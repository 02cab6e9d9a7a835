"""What a script asks of Fabric or a Trainer, against what the launcher has started."""

from __future__ import annotations

from typing import Any, Final

import torch

from paceline.bridges.bridge_run import BridgeRun
from paceline.errors import UsageError

# Fabric and the Trainer have classes of their own, with these names.
CPU, CUDA = "CPUAccelerator", "CUDAAccelerator"
START_DEVICES: Final = {CPU: "cpu", CUDA: None}


def choose_start_device(accelerator: Any) -> str | None:
    """Option `device` of `pl.start` for an accelerator: "cpu", or None for a GPU per worker."""
    return START_DEVICES[type(accelerator).__name__]


def expect_device(accelerator: Any, local_rank: int) -> torch.device:
    """Device that this worker will have, before the run is open."""
    is_cuda = type(accelerator).__name__ == CUDA
    return torch.device("cuda", local_rank) if is_cuda else torch.device("cpu")


def check_devices(strategy: Any, bridge: BridgeRun) -> None:
    """Raise `UsageError` for an accelerator, or a number of devices or nodes, that isn't there.

    Args:
        strategy: A strategy with `accelerator`, `parallel_devices` and `num_nodes`.
        bridge: Its run, which need not be open.
    """
    accelerator, place = strategy.accelerator, bridge.place
    if type(accelerator).__name__ not in START_DEVICES:
        raise UsageError(
            f"{bridge.library} chose a {type(accelerator).__name__}, and paceline trains on "
            'processors and CUDA: say accelerator="cpu" or accelerator="cuda"'
        )
    devices = len(strategy.parallel_devices or ())
    # of GPUs, the library counts all that the host has if the script asks for none
    if type(accelerator).__name__ == CPU and devices not in (1, place.local_size):
        raise UsageError(
            f"devices={devices}, and this host has {place.local_size} workers: leave devices out, "
            f"and say `paceline run --workers {devices}`"
        )
    if strategy.num_nodes not in (1, place.hosts):
        raise UsageError(
            f"num_nodes={strategy.num_nodes}, and the workers are on {place.hosts} hosts: leave "
            f"num_nodes out, and say `paceline run --hosts {strategy.num_nodes}`"
        )


def check_group(group: Any) -> None:
    """Raise `UsageError` for a process group that doesn't hold all workers."""
    everyone = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    if group is not None and group is not everyone:
        raise UsageError("a group of some workers can't be honoured: leave group out")
