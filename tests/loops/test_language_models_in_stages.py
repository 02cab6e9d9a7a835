"""Pipelines over causal language models of transformers, which can't be traced: small ones, made
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.cluster.mesh import parse_mesh
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.causal_models import LAYERS, MODELS, OF_GPT2, build, next_tokens
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, workers
from tests.harness.sharded import put_together

pytestmark = pytest.mark.slow


class Padded(Dataset[Any]):
    """Sentences of different lengths, padded on either side."""

    def __init__(self, count: int = 13, length: int = 7) -> None:
        self.tokens = torch.randint(
            3, 30, (count, length), generator=torch.Generator().manual_seed(3)
        )
        self.mask = torch.ones(count, length, dtype=torch.long)
        for number in range(count):
            self.mask[
                number, slice(length - number % 4, None) if number % 2 else slice(0, number % 3)
            ] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[index] * self.mask[index],
            "attention_mask": self.mask[index],
        }


def trained(
    name: str, cut: Any, prepare: Callable[[Any], Any] = lambda model: None, *, labels: bool = False
) -> Callable[[Run], Any]:
    """What trains two epochs, and gives losses, all parameters, and answers in the end."""

    def body(run: Run) -> Any:
        model = build(name)
        prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(Padded(), batch_size=8), cut=cut
        )
        losses = list[float]()
        for _ in run.epochs(2):
            for batch in loader:
                x, mask = batch["input_ids"], batch["attention_mask"]
                optimizer.zero_grad()
                if labels:
                    loss = run.step(
                        model, x, x, attention_mask=mask, labels=x, loss=lambda out, _: out.loss
                    )
                else:
                    loss = run.step(model, x, x, attention_mask=mask, loss=next_tokens)
                optimizer.step()
                losses.append(run.mean(float(loss)))
        model.eval()
        batch = torch.utils.data.default_collate([Padded()[number] for number in range(5)])
        answers = run.forward(model, **batch).logits
        return (
            losses,
            put_together(
                model, run.group, run._prepared.cuts.placements, run._prepared.cuts.trained_tensor
            ),
            answers,
        )

    return body


def same(name: str, mesh: str, cut: Any, bound: float = 1e-6, **options: Any) -> None:
    """Workers end with the losses, parameters and answers of one process.

    Some layers compute in single precision whatever they get.
    """
    losses, values, answers = alone(trained(name, None, **options))
    for mine, parameters, said in workers(
        math.prod(parse_mesh(mesh).values()), trained(name, cut, **options), mesh=mesh, deadline=120
    ):  # type: ignore[type-var]
        assert mine == pytest.approx(losses, abs=bound)
        assert float((parameters - values).abs().max()) < bound
        assert torch.allclose(said, answers, atol=10 * bound, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_causal_language_models_end_where_one_process_does(name: str) -> None:
    same(name, "stage=2", pl.pipeline(MODELS[name][2], micro_batches=3))


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("stage=3", "zero-bubble"),
        ("stage=2", "interleaved"),
        ("stage=2", "zbv"),
        ("data=2, stage=2", "gpipe"),
    ],
)
def test_schedules_and_replicas_end_where_one_process_does(mesh: str, schedule: Any) -> None:
    same("gpt2", mesh, pl.pipeline(OF_GPT2, schedule=schedule, micro_batches=4), bound=1e-9)
    same("llama", mesh, pl.pipeline("auto", schedule=schedule, micro_batches=4))


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_may_be_shared_out(zero: Any) -> None:
    same(
        "gpt2",
        "shard=2, stage=2",
        [pl.pipeline(OF_GPT2, micro_batches=2), pl.shard("transformer.h.*", zero=zero)],
        bound=1e-9,
    )


def test_layers_may_be_computed_again_and_the_model_may_have_its_own_loss() -> None:
    def again(model: Any) -> None:
        model.gradient_checkpointing_enable()

    same("gpt2", "stage=2", pl.pipeline(OF_GPT2, micro_batches=2), bound=1e-9, prepare=again)
    same("llama", "stage=2", pl.pipeline(LAYERS, micro_batches=1), labels=True)


DROPOUT = """
from tests.harness.causal_models import OF_GPT2, build, next_tokens

model = build("gpt2", embd_pdrop=0.5, resid_pdrop=0.5)
with pl.start() as run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer, cut=pl.pipeline(OF_GPT2, micro_batches=2))
    x = torch.arange(12).view(2, 6)
    losses = [float(run.step(model, x, x, loss=next_tokens)) for _ in range(3)]
    torch.save((losses, torch.rand(())), f"rank{run.rank}.pt")
"""


def test_a_dropout_between_layers_is_drawn_by_the_stage_that_uses_it(
    job: Jobs, tmp_path: Path
) -> None:
    ended = job.run(DROPOUT, 2, "--mesh", "stage=2").end()
    assert ended.code == 0, ended.err
    (one, rest), (two, other) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert one == two and len(set(one)) == 3 and torch.equal(rest, other)


def test_an_encoder_and_a_decoder_share_words_on_all_stages() -> None:
    layers = (
        "encoder.block.*, encoder.final_layer_norm, decoder.block.*, "
        "decoder.final_layer_norm, lm_head"
    )

    def body(run: Run, cut: Any) -> tuple[list[float], Tensor]:
        model = build("t5")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run.prepare(model, optimizer, cut=cut)
        numbers, losses = torch.Generator().manual_seed(1), list[float]()
        for length in (6, 4):
            x, y = (torch.randint(3, 30, (4, size), generator=numbers) for size in (length, 5))
            optimizer.zero_grad()
            losses.append(float(run.step(model, x, y, decoder_input_ids=y, loss=next_tokens)))
            optimizer.step()
        return losses, put_together(
            model, run.group, run._prepared.cuts.placements, run._prepared.cuts.trained_tensor
        )

    losses, values = alone(lambda run: body(run, None))
    for found, parameters in workers(
        3, lambda run: body(run, pl.pipeline(layers, micro_batches=2)), mesh="stage=3"
    ):
        assert (
            found == pytest.approx(losses, abs=1e-9)
            and float((parameters - values).abs().max()) < 1e-9
        )


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    def body(run: Run) -> str:
        model = build("gpt2")
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pl.pipeline(OF_GPT2, micro_batches=2),
        )
        run.step(model, *[torch.arange(12).view(2, 6)] * 2, loss=next_tokens)
        run.save()
        return str(run.folder.path)

    saved, whole = (
        pl.state_dict(workers(2, body, mesh="stage=2", folder=tmp_path)[0]),
        build("gpt2"),
    )
    assert saved.keys() == whole.state_dict().keys()
    whole.load_state_dict(saved)


def test_what_stages_cannot_know_of_each_other_is_refused() -> None:
    def body(run: Run, **options: Any) -> None:
        model = build("gpt2")
        run.prepare(model, cut=pl.pipeline(OF_GPT2, micro_batches=2))
        run.forward(model, torch.arange(12).view(2, 6), **options)

    with pytest.raises(UsageError, match="output_hidden_states collects what is inside of layers"):
        workers(2, lambda run: body(run, output_hidden_states=True), mesh="stage=2")
    with pytest.raises(UsageError, match="use_cache=False"):
        workers(2, lambda run: body(run, use_cache=True), mesh="stage=2")
