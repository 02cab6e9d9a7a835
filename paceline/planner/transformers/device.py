"""What a device achieves: seconds of a matrix product, of other kernels, and of messages.

product of 300 x 500, on 4 processors of which each makes 128 x 256 values at once

+-----------+-----------+        3 x 2 tiles on 4 processors: 2 waves, the second one is
|     1     |     2     |        half empty, and the tiles at the edges are not full
+-----------+-----------+
|     3     |     4     |
+-----------+-----------+
|     5     |     6     |
+-----------+-----------+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, log2
from pathlib import Path

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.formatting import format_choices
from paceline.planner.transformers.toml_tables import check_number, read_toml_table
from paceline.planner.transformers.transformer import HALF, Matmul

# Rows and columns of the tiles that libraries of matrix products choose from, and the share of the
# processor's speed that a tile reaches: a small one reads its inputs more often.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.6))
INNER_START = 96  # steps along the inner dimension that filling and emptying a tile costs
ALIGNMENT = 8  # values in 16 bytes


@dataclass(frozen=True)
class Accelerator:
    """A device that computes.

    Attributes:
        name: Name of the preset.
        peak_flops: Operations per second on the data sheet, in half precision without sparsity.
        achievable: Share of it that the best matrix product reaches.
        processors: Multiprocessors that work on tiles.
        memory_bytes: Memory.
        memory_bandwidth: Bytes per second that an elementwise kernel reads and writes.
        launch_seconds: Seconds of the host's processor for each kernel that it starts. A layer of
            small kernels takes no less than that.
        launch_sharpness: How sharply a layer goes from waiting for launches to waiting for the
            device: the exponent of a sum of powers of both times.
        kernel_seconds: Seconds that a kernel takes on the device besides its work.
        flash_share: Share of the best matrix product's speed that flash attention reaches.
        odd_slowdown: How much longer a product takes if rows in memory have an odd length; it is
            less for multiples of 2 and 4, and nothing for those of 8.
        within: Latency, and the bus bandwidth of an all-reduce between devices of a host.
    """

    name: str
    peak_flops: float
    achievable: float
    processors: int
    memory_bytes: float
    memory_bandwidth: float
    launch_seconds: float
    launch_sharpness: float
    kernel_seconds: float
    flash_share: float
    odd_slowdown: float
    within: LinkSpeed

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("name", "within"):
                whole = field.name == "processors"
                check_number(field.name, getattr(self, field.name), whole=whole)

    def time_matmul(self, matmul: Matmul) -> float:
        """Seconds of a matrix product on the device."""
        return _time_matmul(self, matmul)

    def time_memory(self, nbytes: float, kernels: float) -> float:
        """Seconds of kernels that only read and write."""
        return nbytes / self.memory_bandwidth + kernels * self.kernel_seconds


@lru_cache(maxsize=100_000)
def _time_matmul(device: Accelerator, matmul: Matmul) -> float:
    """Time a product by the tile that is best for it, and by the bytes it moves."""
    speed = device.peak_flops * device.achievable / device.processors
    inner = matmul.inner + INNER_START
    seconds = float("inf")
    for height, width, share in TILES:
        tiles = ceil(matmul.rows / height) * ceil(matmul.columns / width) * matmul.batch
        wave = 2 * height * width * inner / (speed * share)
        seconds = min(seconds, ceil(tiles / device.processors) * wave)
    # Tensor cores read 16 bytes at once (NVIDIA, "Matrix multiplication background", 2023).
    aligned = min(size & -size for size in (matmul.columns, matmul.inner, matmul.rows))
    slowdown = float(device.odd_slowdown ** max(0.0, 1 - log2(aligned) / log2(ALIGNMENT)))
    moved = HALF * matmul.values / device.memory_bandwidth
    return max(seconds * slowdown, moved) + device.kernel_seconds


@dataclass(frozen=True)
class DeviceCluster:
    """Equal hosts with equal devices.

    Ranks are laid out as Megatron does: neighbours along `tensor` are next to each other, then
    those along `data`, and stages are farthest apart.

    Attributes:
        device: The device.
        devices_per_host: Devices of a host.
        hosts: Number of hosts.
        between: Latency, and bytes per second that a host's devices together send to other hosts.
        name: What to call it.
    """

    device: Accelerator
    devices_per_host: int
    hosts: int
    between: LinkSpeed
    name: str = "cluster"

    def __post_init__(self) -> None:
        check_number("devices_per_host", self.devices_per_host, whole=True)
        check_number("hosts", self.hosts, whole=True)

    @property
    def devices(self) -> int:
        return self.devices_per_host * self.hosts

    def find_members(self, size: int, stride: int) -> int:
        """Find how many of a group's `size` ranks, `stride` apart, are on one host."""
        return min(size, max(1, self.devices_per_host // stride))

    def time_all_reduce(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds of an all-reduce in a ring.

        Groups that begin at other ranks do the same at that time, and share the hosts' links.

        Args:
            nbytes: Bytes of the tensor.
            size: Ranks of the group.
            stride: Distance between two of them.
        """
        if size == 1:
            return 0.0
        return self._time_ring(nbytes, size, stride, rounds=2)

    def time_all_gather(self, nbytes: float, size: int, stride: int, *, messages: int = 1) -> float:
        """Seconds in which each rank gets the whole of a tensor. A reduce-scatter takes as long.

        Args:
            nbytes: Bytes of the tensor.
            size: Ranks of the group.
            stride: Distance between two of them.
            messages: Number of parts in which the tensor is gathered. Default: 1.
        """
        if size == 1:
            return 0.0
        return messages * self._time_ring(nbytes / messages, size, stride, rounds=1)

    def _time_ring(self, nbytes: float, size: int, stride: int, *, rounds: int) -> float:
        members = self.find_members(size, stride)
        inside, between = self.device.within, self.between
        latency, speed = inside.latency_seconds * size, inside.bytes_per_second
        if members < size:
            # A host's devices are in this many groups, and share its link.
            groups = self.devices_per_host / members
            speed = min(speed, between.bytes_per_second / groups)
            latency += between.latency_seconds * ceil(size / members)
        return (latency + nbytes * (size - 1) / size / speed) * rounds

    def count_sent_bytes(
        self, nbytes: float, size: int, stride: int, *, rounds: int = 2
    ) -> tuple[float, float]:
        """Count the bytes that one rank of a ring sends: inside of its host, and to others.

        Of a host's members only one sends to another host, so that is a mean over the members.
        """
        sent = rounds * nbytes * (size - 1) / size
        members = self.find_members(size, stride)
        outside = 0.0 if members >= size else sent / members
        return sent - outside, outside

    def crosses_hosts(self, stages: int, stride: int) -> bool:
        """Whether some of the messages between `stages` ranks, `stride` apart, leave a host."""
        return stages * stride > self.devices_per_host

    def time_send(self, nbytes: float, stages: int, stride: int, lanes: int) -> float:
        """Seconds in which a tensor gets from one stage to the next, for the slowest of them.

        The `lanes` workers along `tensor` have the same tensor. Each sends a part of it to another
        host, and the parts are gathered there (Narayanan et al. 2021, section 4.1).

        Args:
            nbytes: Bytes of the tensor.
            stages: Ranks along the pipeline.
            stride: Distance between two of them.
            lanes: Workers along `tensor`.
        """
        inside, between = self.device.within, self.between
        if not self.crosses_hosts(stages, stride):
            return inside.latency_seconds + nbytes / inside.bytes_per_second
        # As many devices of a host send to the next stage as there are between two stages.
        share = between.bytes_per_second / min(stride, self.devices_per_host)
        gather = self.time_all_gather(nbytes, lanes, 1)
        return between.latency_seconds + nbytes / lanes / share + gather


# Three numbers of an A100 are fitted to 30 rows (benchmarks/planned/fit.py): the share of the
# memory's nominal bandwidth that kernels other than products reach, the seconds of a launch, and
# the slowdown of odd rows. Other devices are taken to have the same. The other numbers here are
# assumed.
MEMORY_SHARE, LAUNCH_TIME, ODD_SLOWDOWN = 0.69, 54e-6, 2.3
LAUNCH_SHARPNESS = 6.0
KERNEL_TIME, FLASH_SHARE = 4e-6, 0.55


def _make_preset(
    name: str,
    tflops: tuple[float, float],
    processors: int,
    memory: tuple[float, float],
    within_gbyte: float,
) -> Accelerator:
    """Make a preset of nominal figures, and of the best product and all-reduce that were measured.

    Args:
        name: Name of the preset.
        tflops: Peak of half precision without sparsity, and the speed of the best product.
        processors: Multiprocessors.
        memory: GiB of memory, and its nominal bytes per second.
        within_gbyte: Bus bandwidth of large all-reduces inside of a host, in GB/s.
    """
    peak, best = tflops
    gib, bandwidth = memory
    return Accelerator(
        name,
        peak * 1e12,
        best / peak,
        processors,
        gib * 2**30,
        MEMORY_SHARE * bandwidth,
        LAUNCH_TIME,
        LAUNCH_SHARPNESS,
        KERNEL_TIME,
        FLASH_SHARE,
        ODD_SLOWDOWN,
        LinkSpeed(6e-6, within_gbyte * 1e9),
    )


# Sources, all in benchmarks/published: best products are those of stas00/ml-engineering@744d01e in
# calib_peak_and_achievable_bf16.csv. An A100's all-reduce is that of vTrain's in
# vtrain_calib_a100_allreduce_8gpu.csv (93 us for 1 MB, 7.83 ms for 1 GB); those of H200, B200 and
# V100 are in calib_allreduce_busbw_GBps.csv, and an H100 has that of an H200 without NVLS. These
# tables have no best product of V100 and P40 (0.72 and 0.8 of the peak are assumed), and no
# all-reduce of MI300X and P40 (a data sheet's figure, and PCIe). Peaks, memories and bandwidths are
# those of data sheets. "cpu" is a guess at one processor of 16 cores: better give its numbers.
ACCELERATORS: Mapping[str, Accelerator] = {
    preset.name: preset
    for preset in (
        _make_preset("a100-40gb", (312, 271.2), 108, (40, 1.555e12), 230),
        _make_preset("a100-80gb", (312, 271.2), 108, (80, 2.039e12), 230),
        _make_preset("h100-sxm", (989, 794.5), 132, (80, 3.35e12), 365),
        _make_preset("h200-sxm", (989, 794.5), 132, (141, 4.8e12), 473),
        _make_preset("b200-sxm", (2250, 1745), 148, (180, 8e12), 838),
        _make_preset("mi300x", (1300, 668.4), 304, (192, 5.3e12), 300),
        _make_preset("v100-32gb", (125, 90), 80, (32, 0.9e12), 124),
        # Without tensor cores rows may begin anywhere.
        replace(_make_preset("p40", (11.8, 9.4), 30, (24, 0.346e12), 10), odd_slowdown=1.0),
        replace(_make_preset("cpu", (1.0, 0.7), 1, (64, 80e9), 8), odd_slowdown=1.0),
    )
}


def find_accelerator(name: str) -> Accelerator:
    """Find a preset by name. Raises `UsageError` with the names that there are."""
    if name not in ACCELERATORS:
        raise UsageError(f"device {name!r} is unknown; {format_choices(name, ACCELERATORS)}")
    return ACCELERATORS[name]


def read_device_cluster(path: str | Path) -> DeviceCluster:
    """Read a cluster of devices from the table `[cluster]` of a TOML file.

        [cluster]
        device = "a100-80gb"          # a preset: a100-40gb, h100-sxm, v100-32gb, cpu, ...
        devices_per_host = 8
        hosts = 4
        between_gbit = 1600           # of each host's network; needed for more than one host
        between_us = 10               # its latency; may be left out, and so may all that follows
        within_gbyte = 230            # bus bandwidth of an all-reduce inside of a host, per second
        memory_gib = 80               # of a device
        peak_tflops = 312             # of a device

    Raises:
        UsageError: The file can't be read, a key is missing or unknown, or a number is impossible.
    """
    needed = {"device", "devices_per_host", "hosts"}
    numbers = {"between_gbit", "between_us", "within_gbyte", "memory_gib", "peak_tflops"}
    table = read_toml_table(path, "cluster", needed=needed, optional=numbers)
    try:
        for key in numbers & set(table):
            check_number(key, table[key])
        device = find_accelerator(str(table["device"]))
        inside = device.within
        device = replace(
            device,
            memory_bytes=table.get("memory_gib", device.memory_bytes / 2**30) * 2**30,
            peak_flops=table.get("peak_tflops", device.peak_flops / 1e12) * 1e12,
            within=inside._replace(
                bytes_per_second=table.get("within_gbyte", inside.bytes_per_second / 1e9) * 1e9
            ),
        )
        if table["hosts"] != 1 and "between_gbit" not in table:
            raise UsageError("[cluster] lacks between_gbit, the speed of each host's network")
        between = LinkSpeed(
            table.get("between_us", 10) / 1e6, table.get("between_gbit", 1.0) * 1e9 / 8
        )
        return DeviceCluster(
            device, table["devices_per_host"], table["hosts"], between, Path(path).stem
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
