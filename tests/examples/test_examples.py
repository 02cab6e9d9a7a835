"""The examples: each is short and runs as its first lines say, mostly with two workers, and learns
what it is meant to learn.

`train.py` and `surrogate.py` run alone in tests/test_readme.py, the notebook in
tests/notebook/test_notebook.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import short_timings
from tests.harness.jobs import Ended, Jobs
from tests.harness.sources import code_lines

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = {"train.py", "surrogate.py", "notebook.ipynb"}
MANIFESTS = {"slurm.sbatch", "slurm-survive.sbatch", "kubernetes.yaml"}  # test_manifests.py
BEFORE = {f"migrations/{name}_before.py" for name in ("ddp", "accelerate")}
OF_HOROVOD = "migrations/horovod_before.py"  # tests/bridges/test_horovod_launch.py
LINES = 80  # of code


def run(
    job: Jobs,
    name: str,
    *options: str,
    workers: int = 2,
    args: tuple[str, ...] = (),
    **environ: str,
) -> tuple[Ended, dict[str, Any]]:
    """Run an example to its end: what it wrote, and its summary if it has one."""
    ended = job.program(EXAMPLES / name, workers, *options, args=args, **environ).end()
    assert ended.code == 0, ended
    summaries = sorted((job.folder / "runs").glob("*/summary.json"))
    return ended, json.loads(summaries[-1].read_text()) if summaries else {}


def losses(job: Jobs) -> list[float]:
    (path,) = (job.folder / "runs").glob("*/metrics.jsonl")
    return [
        line["loss"] for line in map(json.loads, path.read_text().splitlines()) if "loss" in line
    ]


class TestRuns:
    def test_image_classification(self, job):
        ended, summary = run(job, "image_classification.py")
        assert summary["steps"] == 36 and summary["results"]["accuracy"] > 0.9, ended

    def test_gpt(self, job):
        ended, summary = run(job, "gpt.py")
        found = losses(job)
        assert summary["steps"] == 100 and found[0] > 4 and sum(found[-10:]) / 10 < 2.7
        assert len([line for line in ended.out.splitlines() if line.startswith("[0] ")]) >= 1

    def test_lora(self, job):
        _, summary = run(job, "lora.py")
        assert summary["results"]["before"] < 0.8 and summary["results"]["after"] > 0.9
        assert next((job.folder / "runs").glob("*/adapters.pt")).stat().st_size < 40_000

    def test_recommender(self, job):
        _, summary = run(job, "recommender.py")
        assert summary["results"]["accuracy"] > 0.8 and summary["servers"]

    def test_diloco(self, job):
        ended, summary = run(job, "diloco.py")
        assert summary["sync"] == "LocalSGD(8, outer=nesterov(), codec=int8())", summary["sync"]
        (error, spread) = map(float, re.findall(r"error (\S+), variance (\S+);", ended.out)[0])
        assert error < 0.25 * spread
        # what two workers would send in each step at least
        dense = 2 * 4 * (16 * 256 + 256 * 256 + 256 * 8 + 2 * 256 + 8)
        assert sum(summary["bytes_sent"].values()) < dense / 10

    @pytest.mark.parametrize("rounds", ["fedavg", "diloco"])
    def test_fleet(self, job, rounds):
        """One of three vehicles is slow: rounds close without it, and it joins later ones."""
        ended, summary = run(job, "fleet.py", workers=3, args=("--slow", "1", "--rounds", rounds))
        assert summary["results"]["accuracy"] > 0.85, ended
        made = summary["servers"][0]["rounds"]
        assert made["by_workers"]["2"] > 0 and made["late"] > 0, made
        assert summary["samples"] == 96 * 600

    def test_spot(self, job):
        """A worker is killed and replaced: all samples are trained on once, and the checkpoint
        is whole.
        """
        options, patient = (
            ("--min-workers", "1", "--restarts", "1"),
            short_timings.environ(recovery={"form": 60.0}),
        )
        ended, summary = run(
            job, "spot.py", *options, workers=3, args=("--interrupt", "20"), **patient
        )
        assert summary["samples"] == 2 * 4096 and summary["steps"] == 128
        assert any("was lost" in event["what"] for event in summary["events"]), summary["events"]
        assert "was killed by SIGKILL" in ended.err
        (folder,) = (job.folder / "runs" / "spot" / "checkpoints").glob("step-00000128")
        assert any(path.suffix == ".safetensors" for path in folder.iterdir())

    def test_pipeline(self, job):
        _, summary = run(job, "pipeline.py")
        assert (
            summary["mesh"] == {"stage": 2} and summary["pipelines"] and summary["final_loss"] < 0.6
        )


class TestMigrations:
    @pytest.mark.parametrize("name", ["ddp", "accelerate", "horovod"])
    def test_after(self, job, name):
        ended, summary = run(job, f"migrations/{name}_after.py")
        assert float(re.findall(r"epoch 2: accuracy (\S+)", ended.out)[0]) > 0.9
        assert summary["steps"] == 3 * 56 and summary["samples"] == 3 * 3584

    def test_before_ddp(self, job):
        """As many steps over as many samples give about the same accuracy."""
        ended, summary = run(job, "migrations/ddp_before.py")
        assert (
            float(re.findall(r"epoch 2: loss \S+, accuracy (\S+)", ended.out)[0]) > 0.9
            and not summary
        )

    def test_before_accelerate(self, job):
        ended, _ = run(job, "migrations/accelerate_before.py", workers=1)
        assert float(re.findall(r"epoch 2: accuracy (\S+)", ended.out)[0]) > 0.9


def everything() -> set[str]:
    return {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def of_bridges() -> set[str]:
    """Examples of bridges that a test in tests/bridges runs: it names the file."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "bridges").glob("test_*.py"))
    examples = {name for name in everything() if name.startswith("bridges/")}
    return {name for name in examples if Path(name).stem in tests}


def count_lines(path: Path) -> int:
    """Lines of an example: of code alone if it is Python."""
    text = path.read_text()
    return len(code_lines(text)) if path.suffix == ".py" else len(text.splitlines())


def test_every_example_is_tested_and_short():
    names = {
        f"{name.removeprefix('test_')}.py" for name in vars(TestRuns) if name.startswith("test_")
    }
    names |= {f"migrations/{name}_after.py" for name in ("ddp", "accelerate", "horovod")}
    names |= ELSEWHERE | MANIFESTS | BEFORE | of_bridges()
    assert everything() == names | {OF_HOROVOD, "README.md"}
    assert [
        name
        for name in sorted(everything() - {"notebook.ipynb"})
        if count_lines(EXAMPLES / name) >= LINES
    ] == []


def test_the_index_names_every_example():
    linked = set(re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (EXAMPLES / "README.md").read_text()))
    assert everything() - {"README.md"} <= linked
    assert [link for link in linked if not (EXAMPLES / link).exists()] == []


def test_what_an_example_says_of_itself_is_a_command_on_itself():
    """The first paragraph of each has the command that starts it."""
    for name in sorted(everything()):
        if name.endswith(".py"):
            commands = re.findall(
                r"`((?:python|paceline|torchrun|accelerate launch|horovodrun) [^`]+)`",
                (EXAMPLES / name).read_text(),
            )
            assert any(
                f"examples/{name}" in command or "python ..." in command for command in commands
            ), name
