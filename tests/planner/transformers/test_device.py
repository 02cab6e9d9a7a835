"""Times of a device and of its cluster: against measurements, and against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planned.readers import read_rows
from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.planner.transformers.device import (
    ACCELERATORS,
    DeviceCluster,
    find_accelerator,
    read_device_cluster,
)
from paceline.planner.transformers.transformer import Matmul

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
A100 = find_accelerator("a100-80gb")
CLUSTER = DeviceCluster(A100, 8, 4, LinkSpeed(1e-5, 80e9))
SOURCE = '[cluster]\ndevice = "a100-80gb"\ndevices_per_host = 8\nhosts = 4\nbetween_gbit = 640\n'


def test_large_products_reach_what_was_measured() -> None:
    best = {
        row["accelerator"]: float(row["max_achievable_matmul_tflops"] or 0)
        for row in read_rows(PUBLISHED / "calib_peak_and_achievable_bf16.csv")
    }
    for name, accelerator in (("a100-80gb", "A100 SXM"), ("h100-sxm", "H100 SXM")):
        product = Matmul(8192, 8192, 8192)
        reached = product.flops / find_accelerator(name).time_matmul(product) / 1e12
        assert 0.9 * best[accelerator] < reached <= best[accelerator]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_product_is_never_faster_than_the_peak(name: str) -> None:
    device = find_accelerator(name)
    for size in (1, 7, 64, 500, 4096):
        product = Matmul(size, 2 * size, 3 * size, 2)
        assert device.time_matmul(product) > product.flops / device.peak_flops


def test_a_product_takes_longer_the_larger_it_is() -> None:
    sizes = [128, 512, 2048, 8192]
    times = [A100.time_matmul(Matmul(size, size, size)) for size in sizes]
    assert times == sorted(times)
    assert A100.time_matmul(Matmul(4096, 4096, 4096)) < A100.time_matmul(Matmul(4097, 4096, 4096))


def test_rows_that_begin_anywhere_are_slow() -> None:
    aligned = A100.time_matmul(Matmul(8192, 50304, 1024))
    assert A100.time_matmul(Matmul(8192, 50257, 1024)) > 2 * aligned
    assert A100.time_matmul(Matmul(8192, 50260, 1024)) < 2 * aligned


def test_a_product_of_thin_matrices_is_bound_by_memory() -> None:
    product = Matmul(8192, 8192, 8)
    assert A100.time_matmul(product) >= 2 * product.values / A100.memory_bandwidth


def test_all_reduces_take_what_vtrain_has_measured() -> None:
    rows = read_rows(PUBLISHED / "vtrain_calib_a100_allreduce_8gpu.csv")
    errors = [
        abs(
            CLUSTER.time_all_reduce(int(row["bytes"]), 8, 1) / float(row["out_of_place_ns"]) * 1e9
            - 1
        )
        for row in rows
    ]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.5


def test_an_all_reduce_by_hand() -> None:
    device = replace(A100, within=LinkSpeed(0.0, 100.0))
    cluster = DeviceCluster(device, 4, 2, LinkSpeed(0.0, 40.0))
    assert cluster.time_all_reduce(1000, 1, 1) == 0
    assert cluster.time_all_reduce(1000, 4, 1) == pytest.approx(2 * 3 / 4 * 1000 / 100)
    # All eight: one ring, which has the whole link of a host.
    assert cluster.time_all_reduce(1000, 8, 1) == pytest.approx(2 * 7 / 8 * 1000 / 40)
    # Four rings of two ranks share it.
    assert cluster.time_all_reduce(1000, 2, 4) == pytest.approx(1000 / 10)
    assert cluster.time_all_gather(1000, 4, 1) == pytest.approx(3 / 4 * 1000 / 100)


def test_bytes_sent_within_and_between_hosts() -> None:
    assert CLUSTER.count_sent_bytes(1000, 8, 1) == (2 * 7 / 8 * 1000, 0)
    assert CLUSTER.count_sent_bytes(1000, 2, 8) == (0, 1000)
    within, between = CLUSTER.count_sent_bytes(1600, 32, 1)
    assert within + between == pytest.approx(2 * 31 / 32 * 1600)
    assert between * 8 == pytest.approx(within + between)


def test_messages_between_stages() -> None:
    near, far = CLUSTER.time_send(1e9, 2, 4, 1), CLUSTER.time_send(1e9, 2, 8, 1)
    assert near < far
    # Eight lanes send an eighth each.
    assert CLUSTER.time_send(1e9, 2, 8, 8) < far / 4
    # The slowest of all messages counts, and it has the link to itself.
    assert near < CLUSTER.time_send(1e9, 16, 1, 1) < far / 4
    assert CLUSTER.crosses_hosts(16, 1) and not CLUSTER.crosses_hosts(8, 1)


def test_more_bandwidth_is_never_slower() -> None:
    fast = replace(CLUSTER, between=LinkSpeed(1e-5, 160e9))
    for size, stride in ((2, 1), (8, 1), (16, 1), (4, 8), (2, 16)):
        assert fast.time_all_reduce(1e8, size, stride) <= CLUSTER.time_all_reduce(1e8, size, stride)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dgx.toml"
    path.write_text(SOURCE)
    assert read_device_cluster(path) == replace(CLUSTER, name="dgx")
    path.write_text(
        SOURCE + "memory_gib = 40\nwithin_gbyte = 50\npeak_tflops = 100\nbetween_us = 3\n"
    )
    cluster = read_device_cluster(path)
    assert cluster.device.memory_bytes == 40 * 2**30
    assert cluster.device.peak_flops == 100e12
    assert cluster.device.within.bytes_per_second == 50e9
    assert cluster.between == LinkSpeed(pytest.approx(3e-6), 80e9)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (('"a100-80gb"', '"a100"'), "a100-80gb"),
        (("hosts = 4", "hosts = 0"), "hosts"),
        (("between_gbit = 640", ""), "between_gbit"),
        (("between_gbit = 640", "between_gbit = -1"), "between_gbit"),
        (("hosts = 4", 'hosts = 4\nspeed = "x"'), "speed"),
        (("devices_per_host = 8", ""), "devices_per_host"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: tuple[str, str], word: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(SOURCE.replace(*change))
    with pytest.raises(UsageError, match=word) as caught:
        read_device_cluster(path)
    assert "\n" not in str(caught.value) and "wrong.toml" in str(caught.value)


def test_one_host_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('[cluster]\ndevice = "cpu"\ndevices_per_host = 2\nhosts = 1\n')
    assert read_device_cluster(path).devices == 2
