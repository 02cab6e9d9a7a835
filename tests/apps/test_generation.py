"""Text is what the model without a cache writes, token for token, in every layout."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.apps.generation import Sampling, generate_tokens
from paceline.apps.gpt import GPT, GPTShape, make_cuts
from paceline.errors import UsageError
from paceline.session.load import DESCRIPTION, describe_model
from paceline.session.run import Run
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, workers

torch.manual_seed(5)
KNOWN = GPT(GPTShape(d=16, layers=2, heads=4, context=12, vocab=24)).double().eval()
with torch.no_grad():
    for parameter in KNOWN.parameters():
        parameter.mul_(8)  # so that its choices are clear
PROMPT, COUNT = [3, 1, 4, 1, 5], 11  # more than the context has room for
GREEDY, WARM = Sampling(0), Sampling(1.5, seed=3)


def reference(sampling: Sampling) -> list[int]:
    """Tokens of the whole window each time."""
    tokens, chance = list(PROMPT), torch.Generator().manual_seed(sampling.seed)
    with torch.no_grad():
        for _ in range(COUNT):
            logits = KNOWN(torch.tensor([tokens[-12:]]))[0, -1]
            tokens.append(int(sampling.pick_token(logits, chance)))
    return tokens[len(PROMPT) :]


def text(run: Run, sampling: Sampling, **options: Any) -> list[int]:
    model = run.prepare(copy.deepcopy(KNOWN), cut=make_cuts(run.mesh.cut_axes), **options)
    return list(generate_tokens(run, model, PROMPT, COUNT, sampling))


@pytest.mark.parametrize(
    ("size", "mesh", "sampling"),
    [
        *((1, None, sampling) for sampling in (GREEDY, WARM)),
        *(
            (2, f"{axis}=2", sampling)
            for axis, sampling in (("tensor", WARM), ("shard", GREEDY), ("stage", WARM))
        ),
        *((4, mesh, WARM) for mesh in ("tensor=4", "stage=2, tensor=2", "shard=2, tensor=2")),
        (4, "shard=2, stage=2", GREEDY),
    ],
    ids=str,
)
def test_all_layouts_write_the_same(size: int, mesh: str | None, sampling: Sampling) -> None:
    wanted = reference(sampling)
    assert len(set(wanted)) > 4
    assert workers(size, lambda run: text(run, sampling), mesh=mesh) == [wanted] * size


def test_seeds_and_temperatures_count() -> None:
    found = [
        alone(lambda run, how=how: text(run, how))
        for how in (WARM, Sampling(1.5, seed=4), Sampling(0.1, seed=3))
    ]
    assert len({tuple(each) for each in found}) == 3


def test_the_newest_tokens_alone_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = copy.deepcopy(KNOWN), list[int]()
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))

    def body(run: Run) -> None:
        list(generate_tokens(run, run.prepare(model), PROMPT, COUNT, GREEDY))

    alone(body)
    assert lengths == [5] + [1] * 7 + [12] * 3
    assert model.positions.cache is None and all(
        block.attention.cache is None for block in model.blocks
    )


def test_the_newest_tokens_alone_are_run_on_each_stage() -> None:
    def body(run: Run) -> list[list[int]]:
        model, lengths = copy.deepcopy(KNOWN), list[list[int]]()
        run.prepare(model, cut=make_cuts(run.mesh.cut_axes))
        for block in model.blocks:
            seen = list[int]()
            block.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append(args[0].shape[1])
            )
            lengths.append(seen)
        list(generate_tokens(run, model, PROMPT, COUNT, GREEDY))
        return lengths

    run = [5] + [1] * 7 + [12] * 3
    assert workers(2, body, mesh="stage=2") == [[run, []], [[], run]]


def test_several_rows_are_refused_where_they_are_cut_into_micro_batches() -> None:
    def body(run: Run) -> None:
        model = run.prepare(copy.deepcopy(KNOWN), cut=make_cuts(run.mesh.cut_axes))
        with model.cache_tokens():
            run.forward(model, torch.tensor([[1, 2, 3], [4, 5, 6]]))

    with pytest.raises(UsageError, match="give one row at a time"):
        workers(2, body, mesh="stage=2")


def test_several_tokens_after_others() -> None:
    x = torch.randint(0, 24, (3, 9), generator=torch.Generator().manual_seed(1))
    parts: list[Tensor] = []
    with torch.no_grad(), KNOWN.cache_tokens() as cache:
        for piece in x.split((4, 3, 1, 1), dim=1):
            parts.append(KNOWN(piece))
            cache.count_tokens(piece.shape[1])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(parts, 1), KNOWN(x), rtol=0, atol=1e-11)


def test_another_number_of_rows_after_all_tokens_are_forgotten() -> None:
    x = torch.randint(0, 24, (3, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = KNOWN(x)
        with KNOWN.cache_tokens() as cache:
            for rows in (slice(0, 2), slice(2, 3), slice(0, 3)):
                found = list[Tensor]()
                for piece in x[rows].split((4, 2), dim=1):
                    found.append(KNOWN(piece))
                    cache.count_tokens(piece.shape[1])
                torch.testing.assert_close(torch.cat(found, 1), wanted[rows], rtol=0, atol=1e-11)
                assert all(len(keys) == len(x[rows]) for keys, _ in cache._layer_tensors.values())
                with pytest.raises(
                    UsageError, match=r"rows have tokens so far, and 7 came: call clear\(\)"
                ):
                    KNOWN(torch.zeros(7, 1, dtype=torch.int64))
                cache.clear()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda run: list(generate_tokens(run, KNOWN, [], 3, GREEDY)), "the prompt is empty"),
        (lambda run: Sampling(-1), "temperature=-1: give 0"),
        (lambda run: Sampling(float("nan")), "temperature=nan: give 0"),
    ],
)
def test_refused(make: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        alone(make)


SHAPE = {"d": 16, "layers": 2, "heads": 2, "context": 8, "vocab": 256}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run whose model writes bytes, in the folder where jobs begin."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = GPT(GPTShape(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)

    def body(run: Run) -> None:
        run.prepare(model)
        run.save()

    workers(1, body, folder=tmp_path / "runs")
    (tmp_path / "runs" / "test" / DESCRIPTION).write_text(describe_model("gpt", SHAPE))
    return tmp_path


def test_the_command(job: Jobs, written: Path) -> None:
    def said(*options: str) -> tuple[str, str]:
        ended = job.start([sys.executable, *job.launcher, "generate", *options]).end()
        assert ended.code == 0, ended.err
        return ended.out, ended.err

    one, _ = said("test", "--greedy", "--tokens", "12", "--prompt", "--as it is: \u00e9")
    two, err = said(
        "runs/test",
        "--temperature",
        "0",
        "--tokens",
        "12",
        "--prompt",
        "--as it is: \u00e9",
        "--mesh",
        "tensor=2",
    )
    assert one.startswith("--as it is: \u00e9") and one == two and len(one) > 14
    three, _ = said(
        "runs/test",
        "--greedy",
        "--tokens",
        "12",
        "--prompt",
        "--as it is: \u00e9",
        "--mesh",
        "stage=2",
    )
    assert three == one
    assert (
        "paceline: 12 tokens in " in err
        and "(2 workers, mesh tensor=2)" in err
        and "[0]" not in one + err
    )
    drawn = {
        said("runs/test", "--seed", seed, "--workers", count)[0]
        for seed, count in (("3", "2"), ("3", "1"), ("4", "1"))
    }
    assert len(drawn) == 2
    assert (job.left(), [path.name for path in (written / "runs").iterdir()]) == ([], ["test"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ("nowhere",),
            (
                "there is no folder runs/nowhere; give the folder of a run, such as runs/NAME, or "
                "of one of its checkpoints"
            ),
        ),
        (
            ("runs/test", "--mesh", "data=2"),
            "--mesh 'data=2' has replicas, which would all write the same text; leave out `data`",
        ),
        (
            ("runs/test", "--mesh", "data, tensor=2"),
            "mesh='data, tensor=2' leaves the size of data open: give it, such as data=2",
        ),
        (
            ("runs/test", "--mesh", "tensor=3"),
            "tokens.weight has size 256, which 3 workers can't cut evenly",
        ),
        (("runs/test", "--prompt", ""), "--prompt is empty"),
        (("runs/test", "--best"), "none was saved with a metric that is a number"),
    ],
)
def test_wrong_commands(job: Jobs, written: Path, options: tuple[str, ...], why: str) -> None:
    ended = job.start([sys.executable, *job.launcher, "generate", *options]).end()
    assert ended.code != 0 and why in ended.err and "Traceback" not in ended.err, ended.err
