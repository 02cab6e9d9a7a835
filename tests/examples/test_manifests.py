"""Manifests: Kubernetes' against the schema of its API, Slurm's by their directives and by what
they would start.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from paceline.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES = sorted(EXAMPLES.glob("*.sbatch"), key=lambda path: path.name)
DIRECTIVES = {  # of sbatch(1), those that such a job may have, and what their values look like
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d+(:\d{2}){1,2}",
    "output": r"\S+",
    "no-kill": r"",
    "requeue": r"",
    "partition": r"\S+",
}
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$PACELINE_SECRET" "${OMP_NUM_THREADS-}" "$@" > "$FOLDER/given"
"""


def parse(words: list[str]) -> None:
    """Let typer parse a command line, without doing what it says."""
    command: Any = typer.main.get_command(app)
    name, found, rest = command.resolve_command(command.make_context("paceline", words), words)
    assert name == "run"
    found.make_context(name, rest)


@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.name)
def test_directives(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#!")
    places = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    # Slurm reads no directive behind the first command
    assert len(places) > 4 and max(places) < first
    for number in places:
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.+))?", lines[number])
        assert match is not None and re.fullmatch(DIRECTIVES[match[1]], match[2] or ""), lines[
            number
        ]


@pytest.mark.jobs
@pytest.mark.parametrize("path", BATCHES, ids=lambda path: path.name)
def test_what_a_batch_would_start(path: Path, tmp_path: Path) -> None:
    """The script runs as bash runs it, with commands of Slurm's that write down what they are
    given.
    """
    for name, body in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'a1\\na2\\n'\n"}.items():
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    given = {
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "FOLDER": str(tmp_path),
    }
    environ = {
        name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
    } | given
    environ["PATH"] = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(path), "train.py", "--lr", "0.1"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    secret, threads, *words = (tmp_path / "given").read_text().splitlines()
    assert re.fullmatch(r"[0-9a-f]{64}", secret) and words[-3:] == ["train.py", "--lr", "0.1"]
    if "paceline" in words:
        command = words[words.index("paceline") + 1 :]
        assert (
            command[command.index("--join") + 1] == "a1:29400"
            and command[command.index("--hosts") + 1] == "2"
        )
        parse(command)
    else:
        assert (
            words
            == ["--cpus-per-task=8", "--kill-on-bad-exit=1", "python", "train.py", "--lr", "0.1"]
            and threads == "8"
        )


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def test_kubernetes_takes_it() -> None:
    assert [document["kind"] for document in documents()] == ["Service", "Job"]
    for document in documents():
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_schema_sees_what_is_wrong() -> None:
    _, job = documents()
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_parts_of_it_fit_each_other() -> None:
    service, job = documents()
    pods, (container,) = (
        job["spec"]["template"]["spec"],
        job["spec"]["template"]["spec"]["containers"],
    )
    assert pods["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    words = container["command"]
    assert (
        f"--join={job['metadata']['name']}-0.{pods['subdomain']}:29400" in words
        and f"--hosts={job['spec']['completions']}" in words
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pods["volumes"]
    }
    assert any(
        mount["mountPath"] == f"{container['workingDir']}/runs"
        for mount in container["volumeMounts"]
    )
    parse([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in words[1:]])
