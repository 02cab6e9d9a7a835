"""Where paceline is installed, torch knows the backend by its name; and the launcher's place is
`paceline://` to it.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.errors import UsageError
from paceline.session import registration
from tests.harness.jobs import Jobs, free_port

ROOT = Path(__file__).parents[2]
GROUP = "torch.backends"


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A PYTHONPATH on which paceline is installed with the entry points of pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    folder = tmp_path / "paceline-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline\nVersion: 0.1.0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{tmp_path}:{ROOT}"


def said(body: str, **environ: str) -> str:
    whole = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, "-c", body]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=whole, cwd="/"
    ).stdout.strip()


def test_torch_knows_the_name_and_imports_next_to_nothing_for_it(installed: str) -> None:
    """It costs some 3 ms of an `import torch`, which everybody pays who has paceline installed."""
    body = """
import sys, torch.distributed as dist
print("PACELINE" in dist.Backend._plugins, *sorted(name for name in sys.modules if name.split(".")[0] == "paceline"))
"""  # noqa: E501
    wanted = "True paceline paceline.errors paceline.session paceline.session.registration"
    assert said(body, PYTHONPATH=installed) == wanted
    assert said(body, PYTHONPATH=installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False"


@pytest.mark.parametrize("automatic", ["1", "0"])
def test_paceline_may_be_imported_before_torch(automatic: str, installed: str) -> None:
    body = "import paceline.backend, torch; print(*torch.distributed.Backend._plugins)"
    assert said(body, PYTHONPATH=installed, TORCH_DEVICE_BACKEND_AUTOLOAD=automatic) == "PACELINE"


BY_NAME = """
import torch, torch.distributed as dist
dist.init_process_group("paceline", init_method="paceline://")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(dist.get_backend(), dist.get_rank(), x.tolist())
dist.destroy_process_group()
"""


def test_mpirun_says_who_is_who(job: Jobs, installed: str) -> None:
    name, port = job.write(BY_NAME), str(free_port())
    started = []
    for rank in range(2):
        told = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        place = {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in told.items()}
        started.append(
            job.start([sys.executable, name], MASTER_PORT=port, PYTHONPATH=installed, **place)
        )
    for rank, each in enumerate(started):
        ended = each.end()
        assert ended.code == 0, ended.err
        assert f"paceline {rank} [3.0, 3.0]" in ended.out


def test_a_rank_of_ones_own_beside_the_launchers_is_refused() -> None:
    registration.register()
    with pytest.raises(UsageError, match="give 'paceline://' alone"):
        dist.init_process_group("paceline", init_method="paceline://", rank=0, world_size=2)


def test_it_is_known_once() -> None:
    registration.register()
    known = dist.Backend._plugins["PACELINE"]
    registration.register()
    assert dist.Backend._plugins["PACELINE"] is known


def test_a_torch_without_distributed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there would end every `import torch`."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(dist, "Backend")
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", None)
    registration.register()
