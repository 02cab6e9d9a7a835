"""Pods of Kubeflow Trainer, as hosts of a lab: the command of the container with the variables that
Trainer gives it, and SIGTERM to one of them, as a preempted pod gets it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.lab.description import Description, Host
from paceline.lab.hosts import Cluster
from tests.harness.jobs import PATIENCE, wait_for

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parents[2] / "examples" / "bridges" / "kubernetes"

SCRIPT = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.manual_seed(0)
data = TensorDataset(torch.arange(90), torch.randn(90, 4), torch.randn(90, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=6, shuffle=True)
with pl.start(seed=1) as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    with open(f"ids-{os.uname().nodename}-{os.getpid()}", "a") as seen:
        for epoch in run.epochs(2):
            for ids, x, y in loader:
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for number in ids.tolist() if run.weight else []:
                    print(epoch, number, file=seen, flush=True)
                while epoch == 0 and run.steps == 4 and not Path("go").exists():
                    time.sleep(0.01)
"""


def start_pods(cluster: Cluster, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the container of a TrainJob in each pod."""
    trainer: Any = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())["spec"]["trainer"]
    assert trainer["command"][0] == "paceline"
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PACELINE_", "PET_"))
    }
    given = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "PACELINE_SECRET": "5a" * 32,
        "PET_NNODES": str(len(cluster.hosts)),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": cluster.hosts[0].address,
        "PET_MASTER_PORT": "29400",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    return [
        cluster.spawn(
            host,
            [sys.executable, "-m", *trainer["command"]],
            environ={**own, **given, "PET_NODE_RANK": str(host)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host in range(len(cluster.hosts))
    ]


def end(pods: list[subprocess.Popen[bytes]]) -> list[tuple[int, str]]:
    """How all of them ended, and what they said."""
    texts = [pod.communicate(timeout=PATIENCE)[0].decode() for pod in pods]
    return [(pod.returncode, text) for pod, text in zip(pods, texts, strict=True)]


def read_samples(folder: Path) -> list[tuple[int, int]]:
    return sorted(
        (int(line.split()[0]), int(line.split()[1]))
        for path in folder.glob("ids-*")
        for line in path.read_text().splitlines()
    )


@pytest.mark.usefixtures("able")
@pytest.mark.real_processes
def test_a_preempted_pod_ends_all_with_a_checkpoint_and_they_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = tuple(Host(f"train-node-0-{number}", 1) for number in range(2))
    with Cluster(Description("train", hosts)) as cluster:
        pods = start_pods(cluster, tmp_path)
        wait_for(lambda: len(read_samples(tmp_path)) == 5 * 6)
        pods[1].terminate()
        (tmp_path / "go").touch()
        ends = end(pods)
        assert [code for code, _ in ends] == [128 + signal.SIGTERM] * 2, ends
        assert "asked to end (SIGTERM): saved step-0000" in ends[0][1], ends
        assert 30 <= len(read_samples(tmp_path)) < 180, "the run was not over yet"
        ends = end(start_pods(cluster, tmp_path))
        assert [code for code, _ in ends] == [0, 0], ends
        assert "resumed from" in ends[0][1]
    assert read_samples(tmp_path) == [(epoch, n) for epoch in range(2) for n in range(90)]
