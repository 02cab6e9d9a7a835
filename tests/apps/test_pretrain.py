"""The demo's script: its data and its model are the same for any number of steps, and it does
what the demo reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline.apps import pretrain
from paceline.apps.gpt import GPT
from tests.harness import nursery
from tests.harness.jobs import Jobs


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A folder of text, enough for a few steps."""
    folder = tmp_path / "words"
    folder.mkdir()
    for number in range(30):
        (folder / f"m{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * 40)
    return folder


def test_the_first_steps_are_the_same(words: Path) -> None:
    short, long = (pretrain.make_task(steps, words) for steps in (2, 5))
    for (x, y), (u, v) in zip(short.train, long.train, strict=False):
        assert torch.equal(x, u) and torch.equal(y, v)
    assert (len(short.train), len(long.train)) == (2, 5)
    assert all(
        torch.equal(p, q)
        for p, q in zip(short.model.parameters(), long.model.parameters(), strict=True)
    )


def test_the_model_leaves_the_random_state_alone(words: Path) -> None:
    before = torch.get_rng_state()
    pretrain.make_task(2, words)
    assert torch.equal(before, torch.get_rng_state())


def test_a_small_text_is_read_several_times(words: Path) -> None:
    task = pretrain.make_task(60, words)
    assert (
        len(task.train)
        == 60
        > len({x.sum().item() for batch, _ in task.train for x in batch}) / pretrain.BATCH
    )


# The script, which writes a few letters in the end, and not 240.
SHORTER = """
from paceline.apps import pretrain
pretrain.generate_sample.__defaults__ = (12,)
pretrain.main()
"""


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.slow
def test_the_script_alone_and_in_meshes(job: Jobs, words: Path, tmp_path: Path) -> None:
    script = tmp_path / "shorter.py"
    script.write_text(SHORTER)
    arguments = [
        "--steps",
        "2",
        "--of",
        "6",
        "--name",
        "x",
        "--folder",
        str(tmp_path / "runs"),
        "--text",
        str(words),
    ]
    answer = nursery.run_script(script, tmp_path, *arguments)
    assert answer.returncode == 0, answer.stderr
    said = json.loads((tmp_path / "runs" / "x" / "demo.json").read_text())
    before, after = said["validation"]
    assert 5 < before < 6.5 and after < before
    assert said["sample"].startswith(pretrain.PROMPT)
    alone = losses(tmp_path / "runs" / "x")
    assert len(alone) == 2
    with pl.load(tmp_path / "runs" / "x") as loaded:
        assert isinstance(loaded.model, GPT)
        assert pretrain.generate_sample(loaded.run, loaded.model, 12) == said["sample"]
    for mesh in ("tensor", "shard", "stage"):
        ended = job.program(
            script,
            2,
            "--mesh",
            mesh,
            args=tuple(mesh if word == "x" else word for word in arguments),
        ).end()
        assert ended.code == 0, ended.err
        folder = tmp_path / "runs" / mesh
        assert losses(folder) == pytest.approx(alone, abs=1e-5)
        assert json.loads((folder / "demo.json").read_text())["validation"] == pytest.approx(
            [before, after], abs=1e-4
        )
