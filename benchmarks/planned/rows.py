"""A published measurement as data: the layout, the machine, the framework, and the seconds."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.comm.schedule import LinkSpeed
from paceline.planner.transformers.device import DeviceCluster, find_accelerator
from paceline.planner.transformers.layouts import ScoredLayout, score_layout
from paceline.planner.transformers.parallel_layout import ParallelLayout
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_cost import FrameworkTraits
from paceline.planner.transformers.transformer_memory import StateBytes

# How frameworks trained when the measurements were made. Nothing here is fitted to iteration times.
#
# Megatron-LM in April 2021 (SC21): nothing runs beside computing; messages between stages are
# waited for, and the host begins each of them.
MEGATRON_2021 = FrameworkTraits(overlap=0.0, overlap_sends=False, message_seconds=2e-4)
# In May 2022 (Korthikanti et al.): gradients in single precision (section 6.3 says that their
# all-reduce isn't overlapped); all-reduces of the backward run beside the products for weights.
MEGATRON_2022 = FrameworkTraits(
    StateBytes(gradients=4),
    overlap=0.0,
    overlap_tensor=0.6,
    overlap_sends=False,
    message_seconds=2e-4,
)
# From 2023: the products for weights add into gradients, and gradients are summed meanwhile.
MEGATRON_2023 = FrameworkTraits(
    StateBytes(gradients=4),
    overlap=0.9,
    overlap_tensor=0.6,
    overlap_sends=False,
    message_seconds=2e-4,
    accumulation_bytes=0.0,
)
# MegaScale (Jiang et al. 2024, section 3.2) and Llama 3 overlap messages between stages, too.
OVERLAPPED = FrameworkTraits(
    StateBytes(gradients=4), overlap=0.9, overlap_tensor=0.9, accumulation_bytes=0.0
)
# vTrain's profile of one device (src/trainer.py of VIA-Research/vTrain@f8dda84): a fused Adam
# without copies in single precision, the loss of torch in half precision, no bucket beside the
# backward ("use_gradient_bucket": false).
VTRAIN = FrameworkTraits(overlap=0.0, optimizer_bytes=28.0, loss_bytes=16.0)

# Of the nominal speed of a network of many hosts, this is what rings of a job reach. Section 6.3 of
# Korthikanti et al. says 0.4 (13 GB in 1.3 s over 25 GB/s), and SimAI's table 0.95 for a collective
# by itself (calib_simai_nccl_efficiency.csv).
NETWORK_SHARE = 0.5


@dataclass(frozen=True)
class MeasuredLayout:
    """A row of a table.

    Attributes:
        label: What to call the row.
        model: The transformer.
        layout: How it was divided.
        cluster: The devices.
        traits: The framework.
        seconds: Measured seconds of a step. None: it ran out of memory.
        group: Rows of a group are choices for one task.
    """

    label: str
    model: Transformer
    layout: ParallelLayout
    cluster: DeviceCluster
    traits: FrameworkTraits
    seconds: float | None
    group: tuple[str, ...] = ()

    def predict(self) -> ScoredLayout:
        """Predict the row."""
        return score_layout(self.model, self.cluster, self.layout, self.traits)

    @property
    def work(self) -> float:
        """Operations of the model on one device, in one step."""
        return self.model.count_model_flops() / self.layout.devices


def make_cluster(
    device: str, devices: int, per_host: int = 8, network_bytes: float = 200e9
) -> DeviceCluster:
    """Make a cluster of enough hosts.

    Args:
        device: Preset.
        devices: Number of devices.
        per_host: Devices of a host.
        network_bytes: Nominal bytes per second of a host's network.
    """
    between = LinkSpeed(10e-6, NETWORK_SHARE * network_bytes)
    return DeviceCluster(
        find_accelerator(device), min(per_host, devices), -(-devices // per_host), between, device
    )
