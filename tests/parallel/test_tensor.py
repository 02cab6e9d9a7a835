"""Layers cut between workers against one process that has all of them: losses, parameters, and what is exchanged for it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.cluster.mesh import Mesh
from paceline.comm.threads import ThreadGroup, spawn
from paceline.errors import UsageError
from paceline.parallel import tensor_functions, tensor_layers
from paceline.parallel.tensor import tensor
from paceline.parallel.tensor_functions import TensorAxis
from paceline.parallel.tensor_styles import column, row, sequence, summed, vocab
from tests.harness.tensor_cuts import (
    PIECES,
    SHAPE,
    WHOLE,
    Batch,
    CountingGroup,
    adamw,
    batches,
    context_of,
    cut_training,
    distance,
    gpt,
    loss_of,
    sgd,
    train,
    whole,
)

torch.set_num_threads(1)
CUTS = pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "pieces"])


def compare(model: nn.Module, cut: tensor, data: Sequence[Batch], *, size: int = 2, loss: Any = loss_of, limit: float = 1e-9) -> None:
    """Train in one process and cut between workers, in float64 by AdamW, and compare."""
    model = model.double()
    losses, parameters = cut_training(size, copy.deepcopy(model), cut, data, adamw, loss=loss)
    wanted, _ = train(model, data, adamw, loss)
    assert all(found == losses[0] for found in losses)
    assert losses[0] == pytest.approx(wanted, rel=1e-9)
    assert distance(parameters, model) < limit


@pytest.mark.parametrize("size", [2, 4])
@CUTS
def test_gpt_with_tied_weights_equals_one_process(size: int, cut: tensor) -> None:
    for dtype, optimizer, steps, limit in ((torch.float32, sgd, 1, 5e-7), (torch.float64, adamw, 20, 1e-9)):
        alone, data = gpt(dtype), batches(steps)
        losses, parameters = cut_training(size, copy.deepcopy(alone), cut, data, optimizer)
        wanted, _ = train(alone, data, optimizer)
        assert all(found == losses[0] for found in losses)
        assert losses[0] == pytest.approx(wanted, rel=1e-6 if dtype == torch.float32 else 1e-10)
        assert distance(parameters, alone) < limit


@pytest.mark.parametrize("mutant", ["forward", "backward", "bias", "norms", "scatter"])
def test_a_layer_that_forgets_its_sum_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PIECES if mutant in ("norms", "scatter") else WHOLE
    if mutant == "forward":
        monkeypatch.setattr(TensorAxis, "total", lambda self, x, name: x)
    elif mutant == "backward":
        monkeypatch.setattr(TensorAxis, "copy", lambda self, x, name: x)
    elif mutant == "bias":
        monkeypatch.setattr(tensor_layers.LayerCut, "sum", lambda self, y, bias: self.axis.total(y + bias, self.name))
    elif mutant == "norms":
        monkeypatch.setattr(TensorAxis, "shared", lambda self, parameters, name: parameters)
    else:
        monkeypatch.setattr(tensor_functions._Gather, "backward", lambda ctx, grad: (ctx.axis.mine(grad, ctx.dim, ""), None, None, None))
    alone, data = gpt(), batches(1)
    try:
        _, parameters = cut_training(2, copy.deepcopy(alone), cut, data, sgd)
    except AssertionError as found:
        assert "differs between ranks" in str(found)
        return
    train(alone, data, sgd)
    assert distance(parameters, alone) > 1e-5


@CUTS
def test_what_a_block_exchanges(cut: tensor) -> None:
    def exchanged(layers: int) -> list[Counter[str]]:
        model = gpt(shape=type(SHAPE)(d=16, layers=layers, heads=2, context=8, vocab=8))
        (x, y), *_ = batches(1, model.shape)

        def body(group: ThreadGroup) -> list[Counter[str]]:
            mine, counting = copy.deepcopy(model), CountingGroup(group)
            cut.apply(mine, context_of(counting))
            mine(x)  # the first output is compared
            counting.calls.clear()
            loss = loss_of(mine, x, y)
            forward = counting.calls.copy()
            loss.backward()
            return [forward, counting.calls - forward]

        return spawn(2, body)[0]

    per_block = [three - two for three, two in zip(exchanged(3), exchanged(2), strict=True)]
    if cut is WHOLE:
        assert per_block == [Counter(all_reduce=2)] * 2
    else:  # and in backward a small one for each norm and for each bias that is added to pieces
        gathers = Counter(all_gather=2, reduce_scatter=2)
        assert per_block == [gathers, gathers + Counter(all_reduce=4)]


def test_layers_that_share_their_input_sum_its_gradient_once() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
            return y

    def body(group: ThreadGroup) -> int:
        mine, counting = copy.deepcopy(model), CountingGroup(group)
        cut.apply(mine, context_of(counting))
        loss = mine(torch.ones(2, 4)).sum()
        counting.calls.clear()
        loss.backward()
        return counting.calls["all_reduce"]

    model, cut = Gated(), tensor({"gate": column(), "up": column(), "down": row()})
    assert spawn(2, body) == [1, 1]
    compare(model, cut, features(3, 4, 4), loss=squares)


def features(steps: int, inputs: int, outputs: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    draw = [torch.randn(6, inputs + outputs, generator=generator, dtype=torch.float64) for _ in range(steps)]
    return [(both[:, :inputs], both[:, inputs:]) for both in draw]


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.mse_loss(out, y.to(out.dtype))


class Conv1D(nn.Module):
    """A linear layer with its weight transposed, as transformers has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 4), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


@pytest.mark.parametrize(
    ("layers", "cut"),
    [
        ([nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)], {"0": column(), "2": row()}),
        ([nn.Linear(5, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)], {"0": column(), "2": row()}),
        ([nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)], {"0": column(parts=2, gather=True), "2": row(split=True)}),
        ([Conv1D(6, 5), nn.Tanh(), Conv1D(4, 6)], {"0": column(), "2": row()}),
        ([nn.Linear(5, 6), nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 4)], {"1": column(gather=True), "4": vocab()}),
        ([nn.Linear(5, 4), nn.Sequential(nn.LayerNorm(2), nn.Tanh()), nn.Linear(4, 3)], {"0": column(), "1": summed(), "2": row()}),
    ],
    ids=["mlp", "no-bias", "gather-split", "conv1d", "head", "summed"],
)
def test_small_models_equal_one_process(layers: list[nn.Module], cut: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    outputs = model(torch.zeros(1, 5)).shape[1] if cut.get("1") != summed() else 3
    if cut.get("1") == summed():  # norms of single heads see two features each
        model = nn.Sequential(layers[0], nn.Unflatten(1, (-1, 2)), layers[1], nn.Flatten(1), layers[2])
        cut = {"0": column(), "2": summed(), "4": row()}
    compare(model, tensor(cut), features(5, 5, outputs), loss=squares)


class LoRA(nn.Module):
    """A frozen layer with a trained one of low rank beside it, as peft wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


def test_frozen_layers_with_adapters_beside_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), LoRA(nn.Linear(4, 6)), nn.Tanh(), LoRA(nn.Linear(6, 3)))
    model[0].requires_grad_(False)
    cut = tensor({"1.base": column(), "1.b": column(), "3.base": row(), "3.a": row()})
    compare(model, cut, features(5, 5, 3), loss=squares)
    with pytest.raises(
        UsageError, match=r"1 is of the kind LoRA, which column\(\) can't cut; .* name what is inside: 1.base \(Linear\), 1.a"
    ):
        tensor({"1": column()}).apply(model, context_of(Unasked()))  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
@CUTS
def test_activation_checkpointing_exchanges_again_in_the_same_order(reentrant: bool, cut: tensor) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = model.tokens(x) + model.positions(torch.arange(x.shape[1]))
        if cut is PIECES:
            h = checkpoint(model.blocks, h, use_reentrant=reentrant)
        else:
            for block in model.blocks:
                h = checkpoint(block, h, use_reentrant=reentrant)
        logits = model.head(model.norm(h)) if reentrant else checkpoint(lambda h: model.head(model.norm(h)), h, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    compare(gpt(), cut, batches(3), loss=loss)


@CUTS
def test_compiled_blocks(cut: tensor) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        for block in model.blocks:
            if not hasattr(block, "compiled"):
                block.compiled = True
                block.compile(backend="aot_eager")
        return loss_of(model, x, y)

    shape = type(SHAPE)(d=16, layers=1, heads=2, context=8, vocab=8)
    compare(gpt(shape=shape), cut, batches(1, shape), loss=loss)


@CUTS
def test_bfloat16_autocast_and_a_scaled_loss(cut: tensor) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss_of(model, x, y)
        assert found.dtype == torch.float32
        return found * 1024

    data, alone = batches(1), gpt()
    losses, parameters = cut_training(2, copy.deepcopy(alone), cut, data, tiny, loss=loss)
    wanted, _ = train(alone, data, tiny, loss)
    assert losses[0] == losses[1] == pytest.approx(wanted, rel=3e-3)
    start = dict(gpt().named_parameters())
    moved = {name: (parameters[name] - start[name].detach(), p.detach() - start[name].detach()) for name, p in alone.named_parameters()}
    assert all((one - two).norm() < 0.05 * two.norm() for one, two in moved.values())


def tiny(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def test_replicas_of_a_cut_model_with_other_samples() -> None:
    """Four workers, data=2, tensor=2: gradients of the parts are averaged over `data` alone."""
    mesh = Mesh((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    model, ((x, y), *_) = gpt(torch.float64), batches(1)

    def body(group: ThreadGroup) -> Any:
        mine, context = copy.deepcopy(model), context_of(group, mesh)
        WHOLE.apply(mine, context)
        half = slice(0, 2) if mesh.coordinates(group.rank)["data"] == 0 else slice(2, 4)
        loss_of(mine, x[half], y[half]).backward()
        over = context.groups.along("data")
        grads = [over.all_reduce(p.grad, op="mean").wait() for p in mine.parameters() if p.grad is not None]
        return [(context.placements.of(p, name), grad) for (name, p), grad in zip(mine.named_parameters(), grads, strict=True)]

    found = whole(spawn(4, body))
    loss_of(model, x, y).backward()
    assert all(torch.allclose(found[name], p.grad, rtol=1e-9, atol=1e-12) for name, p in model.named_parameters() if p.grad is not None)


def test_gradients_that_are_there_are_cut_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()

    def body(group: ThreadGroup) -> Any:
        mine = copy.deepcopy(model)
        for one, two in zip(mine.parameters(), model.parameters(), strict=True):
            one.grad = None if two.grad is None else two.grad.clone()
        tensor({"0": column(), "1": row()}).apply(mine, context_of(group))
        return mine[0].weight.grad, mine[1].weight.grad

    (one, two), (three, four) = spawn(2, body)
    assert torch.equal(torch.cat([one, three]), model[0].weight.grad)
    assert torch.equal(torch.cat([two, four], 1), model[1].weight.grad)


# ---- what is refused


class Unasked:
    """Two workers of which none is asked for anything: what is refused is refused before."""

    rank, size = 0, 2


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 3
        self.inner = nn.Linear(4, 4)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def twice() -> nn.Module:
    shared = nn.Linear(4, 4)
    return nn.ModuleDict({"a": shared, "b": shared})


REFUSED: list[tuple[Any, Any, Any, str]] = [
    (gpt, {"blocks.*.upp": column()}, [], r"no module is called 'blocks\.\*\.upp'; the nearest are blocks\.\d\.up"),
    (
        lambda: nn.Sequential(nn.Linear(4, 5)),
        {"0": column()},
        [],
        r"dimension 0 of 0\.weight has size 5, which 2 workers .*make it 4 or 6, or tensor=5",
    ),
    (
        lambda: nn.Sequential(nn.Linear(4, 9)),
        {"0": column(parts=3)},
        [],
        r"size 9, which 3 parts by 2 workers .*make it 6 or 12, or tensor=3",
    ),
    (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 1)),
        {"0": column()},
        [],
        r"0 is of the kind Conv2d, which column\(\) can't cut; it cuts Linear, Conv1D",
    ),
    (lambda: nn.Sequential(nn.Embedding(4, 4)), {"0": row()}, [], r"kind Embedding, which row\(\) can't cut"),
    (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"0": column(), "*": row()},
        [],
        r"0 is cut by column\(\) and by row\(\) \('0', '\*'\); choose one",
    ),
    (twice, {"a": column()}, [], r"b is a module that is cut under another name"),
    (twice, {"a": column(), "b": row()}, [], r"b, which is a as well, is cut by column\(\) and by row\(\)"),
    (tied, {"0": vocab()}, [], r"0\.weight is 1\.weight as well \(tied\), which isn't cut; cut both alike"),
    (tied, {"0": vocab(), "1": row()}, [], r"1\.weight is 0\.weight as well \(tied\), and they are cut in two ways"),
    (lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), {"0": vocab()}, [], r"0 has max_norm"),
    (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))), {"0": column()}, [], r"the weight of 0 is .*take weight_norm"),
    (
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        {"linear1": column()},
        [],
        r"linear1 lies in TransformerEncoderLayer, which reads its weights",
    ),
    (lambda: nn.DataParallel(nn.Linear(4, 4)), {"module": column()}, [], r"the model is wrapped in DataParallel already"),
    (Heads, {"inner": column()}, ["head"], r"divide='head' names no integer attribute"),
    (Heads, {"inner": column()}, ["heads"], r"\.heads is 3, which 2 workers can't divide evenly; choose tensor=3"),
    (
        lambda: nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])}),
        {"blocks": sequence()},
        [],
        r"blocks \(ModuleList\) is never called itself",
    ),
    (lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4))), {"0": sequence()}, [], r"0\.0 \(Linear\) lies in the region sequence\(\) of 0"),
    (lambda: nn.Sequential(nn.LayerNorm(4)), {"0": sequence()}, [], r"0 \(LayerNorm\) is a single layer"),
    (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4))),
        {"0": sequence(), "0.0": vocab()},
        [],
        r"0\.0 lies in the region 0, where vocab\(\)",
    ),
]


@pytest.mark.parametrize(("make", "layers", "divide", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_cant_be_cut_is_refused_before_anything_is_changed(make: Any, layers: Any, divide: Any, message: str) -> None:
    model = make()
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=message):
        tensor(layers, divide).apply(model, context_of(Unasked()))  # type: ignore[arg-type]
    assert {name: p.shape for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tensor({}), "has no layers"),
        (lambda: tensor("automatic"), "has no layers"),  # type: ignore[arg-type]
        (lambda: tensor({"a": "column"}), r"'a' has 'column'; give column\(\)"),  # type: ignore[dict-item]
        (lambda: tensor({"a": column()}, divide="heads"), "is one text; give a list"),
        (lambda: column(parts=0), "a layer has 1 part or more"),
        (lambda: sequence(dim=-1), "count dimensions from the first"),
    ],
)
def test_a_cut_that_makes_no_sense_is_refused_as_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_it_is_written_as_it_is_read() -> None:
    assert repr(tensor({"a": column(parts=3), "b": row()}, divide=["a.heads"])) == (
        "tensor({'a': column(parts=3), 'b': row()}, divide=['a.heads'])"
    )


def test_a_second_cut_is_refused() -> None:
    def body(group: ThreadGroup) -> None:
        model, context = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), context_of(group)
        cut = tensor({"0": column(), "1": row()})
        cut.apply(model, context)
        cut.apply(model, context)

    with pytest.raises(UsageError, match="0 is cut already; cut it once"):
        spawn(2, body)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            {"0": column()},
            r"what Sequential returns differs between workers .*; 0 is the last one cut by column\(\): row\(\) has to follow",
        ),
        ({"0": row()}, r"0 is cut by rows and takes 2 features of each worker, not 4; cut the layer before it by column\(\)"),
    ],
)
def test_a_plan_that_leaves_parts_is_noticed_in_the_first_pass(layers: Any, message: str) -> None:
    def body(group: ThreadGroup) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4))
        tensor(layers).apply(model, context_of(group))
        model(torch.ones(2, 4))

    with pytest.raises(UsageError, match=message):
        spawn(2, body)


def test_what_cant_be_looked_up_or_cut_in_pieces_raises_on_all() -> None:
    def body(group: ThreadGroup) -> str:
        model = gpt()
        PIECES.apply(model, context_of(group))
        with pytest.raises(UsageError, match=r"tokens: index 40 is out of range; it has 40 rows"):
            model(torch.full((1, 4), 40))
        with pytest.raises(UsageError, match=r"input of blocks: dimension 1 has size 5, which 2 workers .*; make it 6, or 4"):
            model(torch.zeros(1, 5, dtype=torch.int64))
        return repr(model.blocks[0].up)

    assert spawn(2, body) == ["ColumnLinear(in_features=32, out_features=64, bias=True)"] * 2
