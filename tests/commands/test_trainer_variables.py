"""What Kubeflow Trainer's variables say, and what options say against them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster import machine
from paceline.commands.trainer_variables import JobShape, choose_job_shape
from paceline.errors import UsageError

POD = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


def choose(
    environ: dict[str, str], devices: Path = Path("/nowhere"), **options: object
) -> JobShape:
    given = {"workers": None, "hosts": None, "host_rank": None, "join": None, "survives": False}
    return choose_job_shape(**{**given, **options}, environ=environ, devices=devices)  # type: ignore[arg-type]


def test_a_pod_of_a_train_job() -> None:
    assert choose(POD) == JobShape(4, 3, 2, "train-node-0-0.train:29400")


def test_without_variables_it_is_one_worker() -> None:
    assert choose({}) == JobShape(1, 1, None, None)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"workers": 1}, JobShape(1, 3, 2, "train-node-0-0.train:29400")),
        ({"hosts": 2}, JobShape(4, 2, 2, "train-node-0-0.train:29400")),
        ({"host_rank": 0}, JobShape(4, 3, 0, "train-node-0-0.train:29400")),
        ({"join": "a:1"}, JobShape(4, 3, 2, "a:1")),
        ({"hosts": 1}, JobShape(4, 1, None, None)),  # such a job has no meeting point
        ({"hosts": 1, "survives": True}, JobShape(4, 1, 2, "train-node-0-0.train:29400")),
    ],
)
def test_options_come_first(options: dict[str, object], shape: JobShape) -> None:
    assert choose(POD, **options) == shape


def test_a_single_pod_has_no_meeting_point() -> None:
    assert choose(POD | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}) == JobShape(4, 1, None, None)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert choose(POD | {"PET_MASTER_ADDR": "fd00::1"}).join == "[fd00::1]:29400"


def test_auto_counts_gpus_or_else_cores(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    for text, count in (("auto", 2), ("gpu", 2), ("cpu", machine.count_cores())):
        assert choose({"PET_NPROC_PER_NODE": text}, tmp_path).workers == count
    assert choose({"PET_NPROC_PER_NODE": "auto"}).workers == machine.count_cores()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 isn't a whole number from 1 on: set it, or give"),
        ({"PET_NNODES": "0"}, "PET_NNODES=0 isn't a whole number from 1 on"),
        ({"PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE=many isn't a whole number from 1"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu, and this host has no GPU"),
        ({"PET_NODE_RANK": "-1"}, "PET_NODE_RANK=-1 isn't a whole number from 0 on"),
        ({"PET_MASTER_PORT": "http"}, "PET_MASTER_PORT=http isn't a port"),
        ({"PET_MASTER_PORT": "70000"}, "PET_MASTER_PORT=70000 isn't a port"),
        ({"PET_MASTER_PORT": ""}, "PET_MASTER_PORT isn't set, but its other half is"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR isn't set, but its other half is"),
    ],
)
def test_bad_values_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(POD | variables)
