"""What a plan names, what is refused before anything is changed, and what is noticed in the
first pass.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.tensor.styles import column, row, sequence, vocab
from paceline.parallel.tensor.tensor_cut import tensor
from tests.harness.tensor_cuts import PIECES, Unasked, context_of, gpt
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)


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
    (
        gpt,
        {"blocks.*.upp": column()},
        [],
        r"no module is called 'blocks\.\*\.upp'; the nearest are blocks\.\d\.up",
    ),
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
        r"0 is a Conv2d, which column\(\) can't cut; it cuts Linear, Conv1D",
    ),
    (
        lambda: nn.Sequential(nn.Embedding(4, 4)),
        {"0": row()},
        [],
        r"a Embedding, which row\(\) can't cut",
    ),
    (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        {"0": column(), "*": row()},
        [],
        r"0 is cut by column\(\) and by row\(\) \('0', '\*'\); choose one",
    ),
    (twice, {"a": column()}, [], r"b is a module that is cut under another name"),
    (
        twice,
        {"a": column(), "b": row()},
        [],
        r"b, which is a as well, is cut by column\(\) and by row\(\)",
    ),
    (
        tied,
        {"0": vocab()},
        [],
        r"0\.weight is 1\.weight as well \(tied\), which isn't cut; cut both alike",
    ),
    (
        tied,
        {"0": vocab(), "1": row()},
        [],
        r"1\.weight is 0\.weight as well \(tied\), and they are cut in two ways",
    ),
    (
        lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
        {"0": vocab()},
        [],
        r"0 has max_norm",
    ),
    (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))),
        {"0": column()},
        [],
        r"the weight of 0 is .*take weight_norm",
    ),
    (
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        {"linear1": column()},
        [],
        r"linear1 lies in TransformerEncoderLayer, which reads its weights",
    ),
    (
        lambda: nn.DataParallel(nn.Linear(4, 4)),
        {"module": column()},
        [],
        r"the model is wrapped in DataParallel already",
    ),
    (Heads, {"inner": column()}, ["head"], r"divide='head' names no integer attribute"),
    (
        Heads,
        {"inner": column()},
        ["heads"],
        r"\.heads is 3, which 2 workers can't divide evenly; choose tensor=3",
    ),
    (
        lambda: nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])}),
        {"blocks": sequence()},
        [],
        r"blocks \(ModuleList\) is never called itself",
    ),
    (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4))),
        {"0": sequence()},
        [],
        r"0\.0 \(Linear\) lies in the region sequence\(\) of 0",
    ),
    (
        lambda: nn.Sequential(nn.LayerNorm(4)),
        {"0": sequence()},
        [],
        r"0 \(LayerNorm\) is a single layer",
    ),
    (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4))),
        {"0": sequence(), "0.0": vocab()},
        [],
        r"0\.0 lies in the region 0, where vocab\(\)",
    ),
]


@pytest.mark.parametrize(
    ("make", "layers", "divide", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED]
)
def test_what_cant_be_cut_is_refused_before_anything_is_changed(
    make: Any, layers: Any, divide: Any, message: str
) -> None:
    model = make()
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=message):
        tensor(layers, divide).apply(model, context_of(Unasked()))  # type: ignore[arg-type]
    assert {name: p.shape for name, p in model.named_parameters()} == before


def test_a_second_cut_is_refused() -> None:
    def body(group: ThreadGroup) -> None:
        model, context = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), context_of(group)
        cut = tensor({"0": column(), "1": row()})
        cut.apply(model, context)
        cut.apply(model, context)

    with pytest.raises(UsageError, match="0 is cut already; cut it once"):
        spawn(2, body)


def test_what_cant_be_looked_up_or_cut_in_pieces_raises_on_all() -> None:
    def body(group: ThreadGroup) -> str:
        model = gpt()
        PIECES.apply(model, context_of(group))
        with pytest.raises(UsageError, match=r"tokens: index 40 is out of range; it has 40 rows"):
            model(torch.full((1, 4), 40))
        with pytest.raises(
            UsageError,
            match=r"input of blocks: dimension 1 has size 5, which 2 workers .*; make it 6, or 4",
        ):
            model(torch.zeros(1, 5, dtype=torch.int64))
        return repr(model.blocks[0].up)

    assert spawn(2, body) == ["ColumnLinear(in_features=32, out_features=64, bias=True)"] * 2
