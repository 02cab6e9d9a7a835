"""The GPT: its sizes, that it looks back only, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.apps.gpt import GPT, MEDIUM, SMALL, GPTShape, next_token_loss
from paceline.comm.group_protocol import Group
from paceline.parallel.initialise import Blueprint
from paceline.parallel.placement import Placements
from paceline.parallel.tensor.vocab import VocabLogits
from tests.harness.jobs import Jobs
from tests.harness.tensor_cuts import batches, compare, context_of
from tests.harness.thread_groups import spawn

TINY = GPTShape(d=16, layers=2, heads=2, context=8, vocab=11)


def parameters(shape: GPTShape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(shape).parameters())


@pytest.mark.slow
def test_sizes() -> None:
    assert round(parameters(SMALL) / 1e6, 1) == 0.9
    assert round(parameters(MEDIUM) / 1e6) == 19


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).double()
    x = torch.randint(0, 11, (2, 8))
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.slow
def test_it_learns() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x = torch.arange(9).repeat(4, 1)
    first = next_token_loss(model(x[:, :8]), x[:, 1:]).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss = next_token_loss(model(x[:, :8]), x[:, 1:])
        loss.backward()
        optimizer.step()
    assert first > 2 and loss.item() < 0.1
    with torch.no_grad():
        text = x[:1, :3]
        for _ in range(5):
            text = torch.cat([text, model(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert text[0].tolist() == list(range(8))


def test_tied() -> None:
    tied = GPT(GPTShape(d=16, layers=1, heads=2, context=8, vocab=11, tied=True))
    assert tied.head.weight is tied.tokens.weight
    assert "head.weight" not in dict(tied.named_parameters())


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTShape(d=16, layers=1, heads=2, context=8, vocab=11, dropout=0.5))
    x = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="can't be cut in 3 heads"):
        GPT(GPTShape(d=16, heads=3))


def test_each_module_draws_its_own_weights_and_no_more_than_a_block_is_made_at_a_time() -> None:
    """So pl.meta() needs no init=."""
    with pl.meta():
        model = GPT(SMALL)
    blueprint = Blueprint(model)
    for unit in blueprint._units:
        blocks = {node.name.split(".")[1] for node in unit.nodes if node.name.startswith("blocks.")}
        assert len(blocks) <= 1, "the blocks are made with the embeddings"
    blueprint.make_parameters(model, Placements(), 1)
    plain = GPT(SMALL).state_dict()
    for name, value in model.state_dict().items():
        if name.endswith("weight") and value.dim() > 1:
            assert float(value.std()) == pytest.approx(float(plain[name].std()), rel=0.1), name
        else:
            assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_its_plan_cuts_it_between_workers(tied: bool) -> None:
    shape = GPTShape(d=16, layers=2, heads=4, context=8, vocab=12, tied=tied)
    compare(
        GPT(shape),
        pl.tensor("auto"),
        batches(4, shape),
        size=2,
        loss=lambda model, x, y: next_token_loss(model(x), y),
    )


def test_the_plan_is_that_of_a_model_within_another_and_no_worker_has_all_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GPT(GPTShape(d=16, layers=1, heads=4, context=8, vocab=12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.inner(x)
            return logits

    def body(group: Group) -> None:
        model = Wrapped()
        pl.tensor("auto").apply(model, context_of(group))
        inner = model.inner
        assert inner.blocks[0].attention.heads == 2 and inner.blocks[
            0
        ].attention.qkv.weight.shape == (24, 16)
        assert inner.tokens.weight.shape == inner.head.weight.shape == (6, 16)
        logits = model(torch.zeros(1, 8, dtype=torch.int64))
        assert (
            isinstance(logits, VocabLogits)
            and logits.shape == (1, 8, 12)
            and logits.local().shape == (1, 8, 6)
        )

    spawn(2, body)


JOB = """
from paceline.apps.gpt import GPT, GPTShape, next_token_loss
shape = GPTShape(d=16, layers=2, heads=4, context=8, vocab=12)
torch.set_default_dtype(torch.float64)
with pl.start(name=sys.argv[1], seed=3) as run:
    with pl.meta():
        model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    texts = torch.randint(shape.vocab, (43, shape.context + 1), generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(texts), batch_size=8, shuffle=True))
    for _ in run.epochs(2):
        for (text,) in loader:
            loss = next_token_loss(model(text[:, :-1]), text[:, 1:])
            loss.backward()
            run.clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    run.save()
"""  # noqa: E501


def test_processes_train_it_by_its_plan_as_one_does(job: Jobs, tmp_path: Path) -> None:
    for name, count, options in (
        ("cut", 4, ("--mesh", "data=2, tensor=2", "--cut", 'tensor("auto")')),
        ("one", 1, ()),
    ):
        ended = job.run("import sys\n" + JOB, count, *options, args=(name,)).end()
        assert ended.code == 0, ended.err
    found, alone = (pl.state_dict(tmp_path / "runs" / name) for name in ("cut", "one"))
    assert (
        max(
            float((found[name] - value).norm() / value.norm())
            for name, value in alone.items()
            if value.norm() > 0
        )
        < 1e-9
    )
    cut, one = (
        [
            json.loads(line)
            for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        ]
        for name in ("cut", "one")
    )
    assert [line["loss"] for line in cut] == pytest.approx([line["loss"] for line in one], rel=1e-9)
    assert len(one) == 12 and len({line["loss"] for line in one}) == 12
