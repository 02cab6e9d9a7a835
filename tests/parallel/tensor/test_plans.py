"""Plans of models like those of transformers (`base_model_tp_plan` of configurations, `_tp_plan`
of heads), and of these themselves.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.errors import UsageError
from paceline.parallel.tensor.plans import find_plan, read_transformers_plan
from paceline.parallel.tensor.styles import column, row, summed
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.session.run import Run
from tests.harness.runs import alone, workers
from tests.harness.tensor_cuts import (
    SHAPE,
    adamw,
    batches,
    compare,
    cut_training,
    distance,
    features,
    squares,
    train,
)

PLAN = {
    **{f"layers.*.{name}_proj": "colwise" for name in ("q", "k", "v", "up")},
    **{
        "layers.*.q_norm": "replicated_with_grad_allreduce",
        "layers.*.o_proj": "rowwise",
        "layers.*.down_proj": "rowwise",
    },
}


class Layer(nn.Module):
    """Attention with a norm of each head, fewer heads for keys and values, and a perceptron."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj, self.o_proj = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(d, config.num_key_value_heads * self.head_dim) for _ in range(2)
        )
        self.q_norm, self.norm = nn.RMSNorm(self.head_dim), nn.LayerNorm(d)
        self.up_proj, self.down_proj = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shape = (*h.shape[:-1], -1, self.head_dim)
        q, k, v = (
            part.view(shape).transpose(1, 2)
            for part in (self.q_proj(h), self.k_proj(h), self.v_proj(h))
        )
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], -1))
        out: Tensor = x + self.down_proj(F.silu(self.up_proj(x)))
        return out


class Base(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config), Layer(config)])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return h


class ForCausalLM(nn.Module):
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": SHAPE.vocab,
            "tie_word_embeddings": False,
        }
        self.config = SimpleNamespace(
            **{**sizes, "tie_word_embeddings": False, "base_model_tp_plan": PLAN, **changes}
        )
        self.model = Base(self.config)
        self.lm_head = nn.Linear(16, SHAPE.vocab, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model(x))
        return logits


class Perceptron(nn.Module):
    """Two layers that bring a plan; `parts` of its features are counted."""

    tensor_plan = tensor({"up": column(), "down": row()}, divide=["parts"])

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.parts = nn.Linear(4, 8), nn.Linear(8, 4), 4

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).unflatten(-1, (self.parts, -1)).tanh().flatten(-2))
        return out


class Circular(Perceptron):
    tensor_plan = tensor("auto")


def test_modules_bring_their_plans_under_the_names_that_they_have() -> None:
    found = find_plan(nn.Sequential(nn.Linear(4, 4), Perceptron()), 2)
    assert found == ({"1.up": column(), "1.down": row()}, ["1.parts"])
    assert find_plan(ForCausalLM(), 2) == (read_transformers_plan(ForCausalLM(), 2), [])
    with pytest.raises(
        UsageError, match=r"tensor_plan of Circular is tensor\('auto'\); a plan has to name layers"
    ):
        find_plan(Circular(), 2)


def test_what_else_is_divided_is_added_to_a_plan() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Perceptron(), Perceptron())
    compare(model, tensor("auto", divide=["0.parts"]), features(3, 4, 4), loss=squares)


def test_a_plan_is_read_with_the_names_of_the_whole_model() -> None:
    found = read_transformers_plan(ForCausalLM(), 2)
    assert found.pop("lm_head") == column(gather=True)
    assert found.pop("model.layers.*.q_norm") == summed()
    assert {name for name, style in found.items() if style == row()} == {
        "model.layers.*.o_proj",
        "model.layers.*.down_proj",
    }
    assert {name for name, style in found.items() if style == column()} == {
        f"model.layers.*.{each}_proj" for each in ("q", "k", "v", "up")
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_a_plan_equals_one_process(tied: bool) -> None:
    torch.manual_seed(1)
    model, data = ForCausalLM(tie_word_embeddings=tied).double(), batches(5)
    assert ("model.embed" in read_transformers_plan(model, 2)) == tied
    losses, parameters = cut_training(2, model, tensor("auto"), data, adamw)
    wanted, _ = train(model, data, adamw)
    assert losses[0] == losses[1] == pytest.approx(wanted, rel=1e-9)
    assert distance(parameters, model) < 1e-9


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            r"Linear has no plan \(tensor_plan of its class, or base_model_tp_plan of its config\)",
        ),
        (
            lambda: ForCausalLM(num_key_value_heads=1),
            r"num_key_value_heads of the model is 1, which 2 workers can't divide; choose tensor=1",
        ),
        (
            lambda: ForCausalLM(base_model_tp_plan={"layers.*": "sideways"}),
            r"Base cuts layers\.\* by 'sideways', which is not known here",
        ),
    ],
)
def test_what_cant_be_cut_by_itself_is_refused(model: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_transformers_plan(model(), 2)


# ---- transformers' own models, two workers each in two replicas with other samples


SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 25,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}


def library() -> Any:
    return pytest.importorskip("transformers")  # here, as it takes seconds


def mixtral(**changes: Any) -> nn.Module:
    config = library().MixtralConfig(**SIZES, num_local_experts=4, **changes)
    model: nn.Module = library().MixtralForCausalLM(config)
    return model


def gemma2(**changes: Any) -> nn.Module:
    config = library().Gemma2Config(**SIZES, head_dim=4, sliding_window=4, **changes)
    model: nn.Module = library().Gemma2ForCausalLM(config)
    return model


def gpt2(**changes: Any) -> nn.Module:
    model: nn.Module = library().GPT2LMHeadModel(library().GPT2Config(**GPT2, **changes))
    return model


def llama(**changes: Any) -> nn.Module:
    model: nn.Module = library().LlamaForCausalLM(library().LlamaConfig(**SIZES, **changes))
    return model


def losses(model: nn.Module, cut: Any) -> Any:
    texts = torch.randint(3, 24, (24, 8), generator=torch.Generator().manual_seed(4))

    def body(run: Run) -> list[float]:
        mine, found = copy.deepcopy(model), list[float]()
        optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
        loader = DataLoader(
            TensorDataset(texts),
            batch_size=6,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
        )
        mine, optimizer, loader = run.prepare(mine, optimizer, loader, cut=cut)
        for _ in run.epochs(2):
            for (x,) in loader:
                optimizer.zero_grad()
                # its own is in float32
                loss = F.cross_entropy(
                    mine(input_ids=x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()
                )
                loss.backward()
                optimizer.step()
                found.append(run.mean(float(loss.detach())))
        return found

    return body


MODELS = {
    "mixtral": lambda: mixtral(experts_implementation="eager").double(),
    "mixtral by grouped products": mixtral,  # which torch has for float32 at most
    "gemma 2": lambda: gemma2().double(),
    "gpt-2": lambda: gpt2().double(),
    "gpt-2 eager": lambda: gpt2(attn_implementation="eager").double(),
    "llama": lambda: llama(tie_word_embeddings=True).double(),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_trains_as_in_one_process(kind: str) -> None:
    torch.manual_seed(2)
    model = MODELS[kind]()
    wanted = alone(losses(model, None))
    assert len(set(wanted)) > 1
    limit = 1e-7 if next(model.parameters()).dtype == torch.float64 else 1e-5
    for found in workers(
        4, losses(model, pl.tensor("auto")), mesh="data=2, tensor=2", deadline=120
    ):
        assert found == pytest.approx(wanted, rel=limit)


@pytest.mark.slow
def test_what_is_cut_of_each() -> None:
    layers, divide = find_plan(gpt2(), 2)
    assert {name.rpartition(".")[2] for name in layers} == {"c_attn", "c_fc", "c_proj"} and divide
    layers, _ = find_plan(mixtral(), 2)
    assert {
        "model.layers.*.mlp.experts",
        "model.layers.*.self_attn.q_proj",
        "lm_head",
    } <= layers.keys()
    assert "model.embed_tokens" in find_plan(gemma2(), 2).layers


class Experts(nn.Module):
    """Experts that a cut wouldn't know how to treat: with biases, or with weights that lie the
    other way.
    """

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        shapes = ((4, 48, 16), (4, 16, 24)) if biased else ((4, 16, 48), (4, 24, 16))
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        if biased:
            self.down_proj_bias = nn.Parameter(torch.randn(4, 16))


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_experts_of_another_kind_are_refused(biased: bool) -> None:
    model = mixtral()
    model.model.layers[1].mlp.experts = Experts(biased=biased)  # type: ignore[union-attr, index]

    def body(run: Run) -> None:
        run.prepare(copy.deepcopy(model), cut=pl.tensor("auto"))

    with pytest.raises(
        UsageError,
        match=r"tensor: model.layers.1.mlp.experts is a Experts, which experts\(\) can't cut",
    ):
        workers(2, body, mesh="tensor=2")
