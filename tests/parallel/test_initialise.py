"""Parameters without memory get values that depend on the seed and on names alone, whatever is
kept of them, and one module at a time.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel import initialise
from paceline.parallel.initialise import Blueprint, has_meta_parameters
from paceline.parallel.meta import meta
from paceline.parallel.placement import Placement, Placements, chunk_range


class Tied(nn.Module):
    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        if reverse:
            self.embedding.weight = self.head.weight
        else:
            self.head.weight = self.embedding.weight


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.Conv1d(8, 4, 3),
        nn.MultiheadAttention(8, 2),
        nn.BatchNorm1d(4),
        Tied(),
    )


def unborn(make: Callable[[], nn.Module] = build) -> nn.Module:
    with meta():
        model = make()
    return model


def values(
    seed: int = 1, make: Callable[[], nn.Module] = build, init: Any = None
) -> dict[str, Tensor]:
    model = unborn(make)
    Blueprint(model, init).make_parameters(model, Placements(), seed)
    assert not has_meta_parameters(model)
    return {name: value.detach() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_values_depend_on_the_seed_and_the_name_alone() -> None:
    first = values()
    torch.manual_seed(99)
    torch.randn(7)
    assert same(values(), first)
    assert not torch.equal(values(2)["0.weight"], first["0.weight"])
    twins = values(make=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(6, 8)))
    assert torch.equal(twins["0.weight"], first["0.weight"]) and not torch.equal(
        twins["1.weight"], twins["0.weight"]
    )
    more = values(make=lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    assert torch.equal(more["0.weight"], first["0.weight"])


def test_values_are_drawn_as_the_module_does() -> None:
    made, plain = values(), build().state_dict()
    assert list(made) == list(plain)
    for name, value in plain.items():
        assert made[name].shape == value.shape and made[name].dtype == value.dtype
        if value.numel() > 30:
            assert 0.6 < float(made[name].std() / value.std()) < 1.6, name
        elif not value.is_floating_point() or value.unique().numel() == 1:
            assert torch.equal(made[name], value), f"{name} begins as a constant"
    assert float(made["3.out_proj.bias"].abs().sum()) == 0, (
        "attention writes to what is inside of it"
    )


def test_generators_of_the_script_stay_where_they_are() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    wanted = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    values()
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == wanted


def test_objects_stay_the_same() -> None:
    """Optimizers that were made before go on with them."""
    model = unborn()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    Blueprint(model).make_parameters(model, Placements(), 1)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    start = model[0].weight.detach().clone()
    model[0](torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, start - 1)


@pytest.mark.parametrize("flat", [False, True])
def test_each_worker_keeps_its_part(flat: bool) -> None:
    """A cut replaces parameters, or gives them another content, on a model without memory."""
    whole, size = values(), 3
    for rank in range(size):
        model, placements = unborn(), Placements()
        blueprint = Blueprint(model, prefix="model1.")
        reference = unborn()
        expected = Blueprint(reference, prefix="model1.")
        expected.make_parameters(reference, Placements(), 1)
        for module in model.modules():
            for parameter in list(module._parameters.values()):
                if parameter is None or "axis" in parameter.__dict__:
                    continue
                path = next(path for path, p in model.named_parameters() if p is parameter)
                at = Placement.whole("model1." + path, parameter.shape)
                start, stop = chunk_range(
                    parameter.numel() if flat else parameter.shape[0], rank, size
                )
                at = (
                    at.cut_flat(start, stop, "shard")
                    if flat
                    else at.cut_dim(0, [(start, stop)], "tensor")
                )
                new = nn.Parameter(torch.empty(at.local, device="cpu" if flat else "meta"))
                torch.utils.swap_tensors(parameter, new)
                parameter.__dict__["axis"] = True
                placements.add_placement(parameter, at)
        blueprint.make_parameters(model, placements, 1)
        wanted = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(
                parameter, placements.placement_of(parameter).copy_part(wanted[name].detach())
            ), name
    assert not torch.equal(whole["0.weight"], wanted["0.weight"]), (
        "two models of a run begin differently"
    )


def test_one_module_is_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unborn(lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(20))))
    now, most, real = [0], [0], initialise._make_real

    def counted(stand_in: nn.Parameter) -> nn.Parameter:
        made = real(stand_in)
        nbytes = made.nbytes
        now[0] += nbytes
        most[0] = max(most[0], now[0])
        weakref.finalize(made.untyped_storage(), lambda: now.__setitem__(0, now[0] - nbytes))
        return made

    monkeypatch.setattr(initialise, "_make_real", counted)
    blueprint, placements = Blueprint(model), Placements()
    for name, parameter in model.named_parameters():
        at = Placement.whole(name, parameter.shape).cut_dim(0, [(0, 1)], "tensor")
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.empty(at.local, device="meta")))
        placements.add_placement(parameter, at)
    blueprint.make_parameters(model, placements, 1)
    assert most[0] <= 2 * 4 * (16 * 16 + 16) < 20 * 4 * (16 * 16 + 16), (
        "of a module and the next one"
    )


def test_a_tied_parameter_is_that_of_its_first_module() -> None:
    one, other = unborn(Tied), unborn(lambda: Tied(reverse=True))
    Blueprint(one).make_parameters(one, Placements(), 1)
    Blueprint(other).make_parameters(other, Placements(), 1)
    assert one.head.weight is one.embedding.weight and other.head.weight is other.embedding.weight
    assert float(one.head.weight.detach().abs().max()) > 1, "as an embedding begins"
    assert float(other.head.weight.detach().abs().max()) <= 0.5, "as a linear layer begins"


class Scale(nn.Module):
    def __init__(self, start: float = 2.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), start))


class Own(nn.Module):
    """It gives values itself to what is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        nn.init.normal_(self.up.weight, std=0.3)


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.up.weight, 0.25)
        self.down.bias = nn.Parameter(torch.full((4,), 3.0))


def test_a_module_may_reset_what_is_inside_of_it() -> None:
    found = values(make=lambda: nn.Sequential(Container(), nn.Linear(2, 2)))
    assert torch.equal(found["0.up.weight"], torch.full((4, 4), 0.25)) and torch.equal(
        found["0.down.bias"], torch.full((4,), 3.0)
    )
    assert found["0.up.bias"].unique().numel() == 4


def fill(module: nn.Module) -> None:
    if isinstance(module, Scale):
        module.scale.fill_(7.0)
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.1)


def test_values_by_a_function_of_a_module() -> None:
    found = values(make=lambda: nn.Sequential(Scale(), Own()), init=fill)
    assert torch.equal(found["0.scale"], torch.full((4,), 7.0))
    assert (
        0 < float(found["1.up.weight"].abs().max()) < 0.6
        and float(found["1.up.bias"].abs().max()) > 0
    )


@pytest.mark.parametrize(
    ("make", "init", "why"),
    [
        (
            lambda: nn.Sequential(Scale()),
            None,
            (
                r"nothing gives values to 0.scale: Scale has no reset_parameters that writes to "
                r"them; say"
            ),
        ),
        (lambda: nn.Sequential(Scale()), lambda module: None, r"nothing gives values to 0.scale"),
        (
            lambda: nn.Sequential(*(Scale() for _ in range(8))),
            None,
            r"0.scale, 1.scale, 2.scale, 3.scale, 4.scale and 3 more",
        ),
        (
            Own,
            None,
            (
                r"the model gives values of its own to up.weight, which are not those of "
                r"reset_parameters"
            ),
        ),
        (lambda: nn.LSTM(2, 2), None, r"weight_ih_l0 is held by weak references \(LSTM does so\)"),
    ],
)
def test_what_nobody_makes_is_named(make: Callable[[], nn.Module], init: Any, why: str) -> None:
    model = unborn(make)
    with pytest.raises(UsageError, match=why):
        Blueprint(model, init).make_parameters(model, Placements(), 1)


class ByNumbers(nn.Module):
    """A reset that needs numbers, which a trial without memory doesn't have, and gives values to
    what `written` says.
    """

    def __init__(self, written: str = "scale", *, whole: bool = False) -> None:
        super().__init__()
        self.written = written
        self.scale, self.shift = nn.Parameter(torch.empty(4)), nn.Parameter(torch.empty(3))
        self.places = (
            nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False) if whole else None
        )

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale[: int(torch.ones(4, device=self.scale.device).sum().item())] = 2.0
            if "shift" in self.written:
                self.shift[0 if self.written == "a part of shift" else slice(None)] = 3.0


def test_a_reset_that_needs_numbers_gives_values() -> None:
    found = values(make=lambda: nn.Sequential(ByNumbers("scale and shift")))
    assert torch.equal(found["0.scale"], torch.full((4,), 2.0)) and torch.equal(
        found["0.shift"], torch.full((3,), 3.0)
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: nn.Sequential(ByNumbers("scale")),
            r"nothing gives values to 0.shift: ByNumbers has no reset_parameters",
        ),
        (lambda: nn.Sequential(ByNumbers("a part of shift")), r"nothing gives values to 0.shift"),
        (
            lambda: nn.Sequential(ByNumbers("scale and shift", whole=True)),
            r"0.places has whole numbers, and the reset of ByNumbers can't",
        ),
    ],
)
def test_what_a_reset_that_needs_numbers_skips_is_named(
    make: Callable[[], nn.Module], why: str
) -> None:
    model = unborn(make)
    with pytest.raises(UsageError, match=why):
        Blueprint(model).make_parameters(model, Placements(), 1)


def test_values_given_after_the_block_are_not_lost_silently() -> None:
    model = unborn(lambda: nn.Sequential(nn.Linear(2, 2)))
    nn.init.ones_(model[0].weight)
    with pytest.raises(
        UsageError, match=r"0.weight was written to after pl.meta\(\), when it had no memory"
    ):
        Blueprint(model)


def test_buffers_without_memory_are_named() -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
    with pytest.raises(
        UsageError,
        match=r"buffers have no memory: running_mean, running_var, num_batches_tracked; build",
    ):
        Blueprint(model)


def test_a_model_that_has_memory_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Scale())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Blueprint(model).make_parameters(model, Placements(), 1)
    assert same(model.state_dict(), before)


def test_only_what_has_no_memory_is_made() -> None:
    """As with LoRA: adapters of a model that was loaded."""
    model = nn.Sequential(nn.Linear(2, 2))
    kept = model[0].weight.detach().clone()
    with meta():
        model.append(nn.Linear(2, 3))
    Blueprint(model).make_parameters(model, Placements(), 1)
    assert torch.equal(model[0].weight, kept) and not model[1].weight.is_meta
