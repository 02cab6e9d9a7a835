"""Pipelines over causal language models of transformers, which can't be traced: small ones, made here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.cluster.mesh import read
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.runs import alone, workers
from tests.harness.sharded import put_together

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 16, **SMALL}
LLAMA = {"intermediate_size": 24, "num_key_value_heads": 1, **SIZES}
GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **SMALL}
OPT = {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, **SIZES}
LAYERS = "model.embed_tokens, model.layers.*, model.norm, lm_head"
OF_GPT2 = "transformer.wte, transformer.wpe, transformer.h.*, transformer.ln_f, lm_head"  # whose head is tied to its first layer
OF_OPT = "model.decoder.embed_tokens, model.decoder.embed_positions, model.decoder.layers.*, model.decoder.final_layer_norm, lm_head"

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": ("GPT2", GPT2, OF_GPT2),
    "llama": ("Llama", LLAMA, LAYERS),
    "llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True}, LAYERS),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8}, LAYERS),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 3}, LAYERS),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "experts_implementation": "eager"}, LAYERS),
    "opt": ("OPT", OPT, OF_OPT),
    "gpt-neox": ("GPTNeoX", {"intermediate_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0, **SIZES}, "auto"),
}


def build(name: str, **options: Any) -> nn.Module:
    kind, sizes, _ = MODELS[name]
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")
    return fill(model(getattr(transformers, f"{kind}Config")(**sizes | options)).double())


class Padded(Dataset[Any]):
    """Sentences of different lengths, padded on either side."""

    def __init__(self, count: int = 13, length: int = 7) -> None:
        self.tokens = torch.randint(3, 30, (count, length), generator=torch.Generator().manual_seed(3))
        self.mask = torch.ones(count, length, dtype=torch.long)
        for number in range(count):
            self.mask[number, slice(length - number % 4, None) if number % 2 else slice(0, number % 3)] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index] * self.mask[index], "attention_mask": self.mask[index]}


def next_tokens(out: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def trained(name: str, cut: Any, prepare: Callable[[Any], Any] = lambda model: None, *, labels: bool = False) -> Callable[[Run], Any]:
    """What trains two epochs, and gives losses, all parameters, and answers in the end."""

    def body(run: Run) -> Any:
        model = build(name)
        prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Padded(), batch_size=8), cut=cut)
        losses = list[float]()
        for _ in run.epochs(2):
            for batch in loader:
                x, mask = batch["input_ids"], batch["attention_mask"]
                optimizer.zero_grad()
                if labels:
                    loss = run.step(model, x, x, attention_mask=mask, labels=x, loss=lambda out, _: out.loss)
                else:
                    loss = run.step(model, x, x, attention_mask=mask, loss=next_tokens)
                optimizer.step()
                losses.append(run.mean(float(loss)))
        model.eval()
        batch = torch.utils.data.default_collate([Padded()[number] for number in range(5)])
        answers = run.forward(model, **batch).logits
        return losses, put_together(model, run.group, run._prepared.cuts.placements, run._prepared.cuts.trained), answers

    return body


def same(name: str, mesh: str, cut: Any, bound: float = 1e-6, **options: Any) -> None:
    """Workers end with the losses, parameters and answers of one process. Some layers compute in single precision whatever they get."""
    losses, values, answers = alone(trained(name, None, **options))
    for mine, parameters, said in workers(math.prod(read(mesh).values()), trained(name, cut, **options), mesh=mesh, deadline=120):  # type: ignore[type-var]
        assert mine == pytest.approx(losses, abs=bound)
        assert float((parameters - values).abs().max()) < bound
        assert torch.allclose(said, answers, atol=10 * bound, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_causal_language_models_end_where_one_process_does(name: str) -> None:
    same(name, "stage=2", pl.pipeline(MODELS[name][2], micro_batches=3))


@pytest.mark.parametrize(
    ("mesh", "schedule"), [("stage=3", "zero-bubble"), ("stage=2", "interleaved"), ("stage=2", "zbv"), ("data=2, stage=2", "gpipe")]
)
def test_schedules_and_replicas_end_where_one_process_does(mesh: str, schedule: Any) -> None:
    same("gpt2", mesh, pl.pipeline(OF_GPT2, schedule=schedule, micro_batches=4), bound=1e-9)
    same("llama", mesh, pl.pipeline("auto", schedule=schedule, micro_batches=4))


@pytest.mark.parametrize("zero", [1, 3])
def test_stages_may_be_shared_out(zero: Any) -> None:
    same("gpt2", "shard=2, stage=2", [pl.pipeline(OF_GPT2, micro_batches=2), pl.shard("transformer.h.*", zero=zero)], bound=1e-9)


def test_layers_may_be_computed_again_and_the_model_may_have_its_own_loss() -> None:
    def again(model: Any) -> None:
        model.gradient_checkpointing_enable()

    same("gpt2", "stage=2", pl.pipeline(OF_GPT2, micro_batches=2), bound=1e-9, prepare=again)
    same("llama", "stage=2", pl.pipeline(LAYERS, micro_batches=1), labels=True)


def test_a_dropout_between_layers_is_drawn_by_the_stage_that_uses_it() -> None:
    def body(run: Run) -> tuple[list[float], Tensor]:
        model = build("gpt2", embd_pdrop=0.5, resid_pdrop=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer, cut=pl.pipeline(OF_GPT2, micro_batches=2))
        x = torch.arange(12).view(2, 6)
        losses = []
        for _ in range(3):
            losses.append(float(run.step(model, x, x, loss=next_tokens)))
        return losses, torch.rand(())

    (one, rest), (two, other) = workers(2, body, mesh="stage=2")
    assert one == two and len(set(one)) == 3 and torch.equal(rest, other)


def test_what_stages_cannot_know_of_each_other_is_refused() -> None:
    def body(run: Run, **options: Any) -> None:
        model = build("gpt2")
        run.prepare(model, cut=pl.pipeline(OF_GPT2, micro_batches=2))
        run.forward(model, torch.arange(12).view(2, 6), **options)

    with pytest.raises(UsageError, match="output_hidden_states collects what is inside of layers"):
        workers(2, lambda run: body(run, output_hidden_states=True), mesh="stage=2")
    with pytest.raises(UsageError, match="use_cache=False"):
        workers(2, lambda run: body(run, use_cache=True), mesh="stage=2")
