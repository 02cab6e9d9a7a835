"""A model of a run, loaded to be used: by one process, by two that cut it, and what can't be
loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape
from paceline.errors import UsageError
from paceline.session.load import DESCRIPTION, describe_model
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, workers

SHAPE = GPTShape(d=16, layers=2, heads=2, context=8, vocab=12)
TOKENS = torch.arange(8).view(1, 8)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def saved(folder: Path, model: nn.Module) -> Path:
    def body(run: Any) -> None:
        run.prepare(model)
        run.save()

    alone_in(folder, body)
    return folder / "test"


def alone_in(folder: Path, body: Callable[[Any], None]) -> None:
    workers(1, body, folder=folder)


def written(folder: Path) -> tuple[Path, Tensor]:
    """A run of the demo's model, and what it gives."""
    model = GPT(SHAPE).double()
    path = saved(folder, model)
    (path / DESCRIPTION).write_text(
        describe_model("gpt", {"d": 16, "layers": 2, "heads": 2, "context": 8, "vocab": 12})
    )
    return path, model(TOKENS).detach()


@pytest.mark.parametrize("made", [build, build()], ids=["function", "model"])
def test_by_one_process(tmp_path: Path, made: Any) -> None:
    torch.manual_seed(3)
    model = build()
    folder = saved(tmp_path, model)
    x = torch.randn(2, 4)
    with pl.load(folder, made) as loaded:
        inside = loaded.run.folder.path
        assert torch.equal(loaded(x), model.eval()(x)) and not loaded(x).requires_grad
        assert inside.exists() and not loaded.model.training
    assert not inside.parent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test"]


BODY = """
with pl.load("runs/test", mesh="tensor") as loaded:
    blocks = loaded.model.get_parameter("blocks.0.up.weight").shape
    answer = loaded(torch.arange(8).view(1, 8))
    torch.save((tuple(blocks), answer), f"answer-{rank}.pt")
"""


def test_models_of_the_demo_are_known_by_their_folder(job: Jobs, tmp_path: Path) -> None:
    _, wanted = written(tmp_path / "runs")
    ended = job.run(BODY).end()
    assert ended.code == 0, ended.err
    for rank in range(2):
        blocks, answer = torch.load(tmp_path / f"answer-{rank}.pt")
        assert blocks == (32, 16)
        torch.testing.assert_close(answer.double(), wanted, rtol=1e-5, atol=1e-6)
    assert (job.left(), [path.name for path in (tmp_path / "runs").iterdir()]) == ([], ["test"])


RESTARTED = """
import signal
with pl.load("runs/test", mesh="tensor") as loaded:
    answer = loaded(torch.arange(8).view(1, 8))
    if rank == 1 and not os.path.exists("again"):
        open("again", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    loaded.run.barrier()
    print("answered", flush=True)
"""


def test_a_job_that_starts_again_answers_and_leaves_nothing(job: Jobs, tmp_path: Path) -> None:
    written(tmp_path / "runs")
    ended = job.run(RESTARTED, 2, "--restarts", "1").end()
    assert ended.code == 0 and ended.out.count("answered") == 2, ended.err
    assert (job.left(), [path.name for path in (tmp_path / "runs").iterdir()]) == ([], ["test"])


def test_a_checkpoint_itself_will_do(tmp_path: Path) -> None:
    path, wanted = written(tmp_path)
    for place in (path / "checkpoints", path / "checkpoints" / "step-00000000"):
        with pl.load(place) as loaded:
            torch.testing.assert_close(loaded(TOKENS).double(), wanted, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    folder = saved(tmp_path, build())
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere; give that of a run"):
        pl.load(tmp_path / "nowhere")
    with pytest.raises(
        UsageError, match=r"test doesn't say which model it has: give load\(folder, model\)"
    ):
        pl.load(folder)
    with pytest.raises(UsageError, match=r"load got the model 'text'; give an nn.Module"):
        pl.load(folder, "text")  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"a function that makes a int; give one that makes the model"
    ):
        pl.load(folder, lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(
        UsageError,
        match=r"weights of another model: 0.weight is \[4, 4\] in it, \[5, 4\] in the model",
    ):
        pl.load(folder, lambda: nn.Sequential(nn.Linear(4, 5)))
    with pytest.raises(UsageError, match=r"mesh='tensor=2' doesn't fit 1 workers"):
        pl.load(folder, build, mesh="tensor=2")
    for wrong in (
        "[]",
        "{",
        json.dumps({"program": "os", "fields": {}}),
        json.dumps({"program": "gpt", "fields": {"depth": 3}}),
    ):
        (folder / DESCRIPTION).write_text(wrong)
        with pytest.raises(
            UsageError, match=r"model.json is not what a program of this paceline writes"
        ):
            pl.load(folder)
    alone(lambda run: None)  # nothing of them is in the way of the next run


FIELDS = {"d": 16, "layers": 2, "heads": 2, "context": 8, "vocab": 12}
ODD: list[Any] = [None, True, -1, 0, 3, 0.5, 10**9, 10**12, 1 << 70, "x", [], {}, float("nan")]


def test_a_description_that_is_made_up_makes_no_model(tmp_path: Path) -> None:
    """Before any memory is taken, and nothing that it names is imported."""
    path, _ = written(tmp_path)
    wrong = [
        json.dumps({"program": "gpt", "fields": {**FIELDS, name: odd}})
        for name in FIELDS
        for odd in ODD
    ]
    wrong += [json.dumps({"program": "gpt", "fields": {**FIELDS, "dropout": odd}}) for odd in ODD]
    wrong += [
        json.dumps({"program": odd, "fields": FIELDS}) for odd in ("os", "paceline.apps.gpt", *ODD)
    ]
    wrong += [json.dumps({"program": "gpt", "fields": odd}) for odd in ODD]
    wrong += [
        "[" * 100_000,
        '{"a":' * 100_000,
        " " * (1 << 20) + "{}",
        "5",
        "",
        '{"program": "gpt", "fields": {"d": ' + "9" * 9000 + "}}",
    ]
    for text in wrong:
        (path / DESCRIPTION).write_text(text)
        try:
            pl.load(path).close()
        except UsageError:
            continue
        assert '"context": 3' in text or '"vocab": 3' in text or '"dropout": 0' in text, text
