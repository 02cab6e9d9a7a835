"""A launcher in a process of its own; jobs that it starts are tested with `pl.launch`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.cluster.launcher import agent
from paceline.cluster.launcher.request import LaunchRequest
from tests.harness.jobs import PATIENCE


def test_a_request_arrives_as_it_was() -> None:
    for job in (
        LaunchRequest("a.py"),
        LaunchRequest("a.py", ("b", "c"), 3, sync="AllReduce()", call=(7, 8), restarts=2),
    ):
        assert agent.read_request(agent.make_command(job, 1)[-1]) == job


@pytest.mark.jobs
def test_without_its_parent_it_starts_nothing(tmp_path: Path) -> None:
    """The parent may have ended before the agent could say that it wants to end with it."""
    script = tmp_path / "script.py"
    script.write_text("import pathlib; pathlib.Path('begun').touch()")
    ended = subprocess.run(
        agent.make_command(LaunchRequest(str(script)), 1),
        cwd=tmp_path,
        check=False,
        timeout=PATIENCE,
    )
    assert ended.returncode == 128 + agent.END_SIGNAL and [
        path.name for path in tmp_path.iterdir()
    ] == ["script.py"]
