"""Options of run.prepare that are said before there is a loader, or a model, hold for those that
come.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import DataError, UsageError
from paceline.prepare.options import DEFAULTS, PrepareOptions
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.runs import alone, batches, distance, parameters, workers


def net(*layers: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), *layers, nn.Linear(5, 2)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def tokens(batch: Any) -> float:
    return float((1 + batch[0][:, 0].abs()).sum())


def trained(run: Run, *, first: dict[str, Any], then: dict[str, Any]) -> Tensor:
    """Two epochs with an uneven last batch; `first` are the options of the call with the model,
    `then` those of the loader's.
    """
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    if run.size > 1:
        model, opt = run.prepare(model, opt, **first)
        loader = run.prepare(batches(19, 6), **then)
    else:
        model, opt, loader = run.prepare(model, opt, batches(19, 6), **first, **then)
    options = {**first, **then}
    for _ in range(2):
        for x, y in loader:
            opt.zero_grad()
            losses = F.mse_loss(model(x), y, reduction="none").mean(1)
            weights = 1 + x[:, 0].abs()
            if options.get("loss") == "sum":
                loss = losses.sum() / 3
            elif "weigh" in options:
                loss = (losses * weights).sum() / weights.sum()
            else:
                loss = losses.mean()
            loss.backward()
            opt.step()
    return parameters(model)


@pytest.mark.parametrize(
    "options",
    [{"loss": "sum"}, {"weigh": tokens}],
    ids=["sum", "weigh"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_said_with_the_model_holds_for_a_loader_that_comes_later(
    options: dict[str, Any], size: int
) -> None:
    wanted = alone(lambda run: trained(run, first=options, then={}))
    # or the option would mean nothing
    assert distance(alone(lambda run: trained(run, first={}, then={})), wanted) > 1e-3
    for found in workers(size, lambda run: trained(run, first=options, then={})):
        assert distance(found, wanted) < 1e-12


def test_shares_and_train_are_kept() -> None:
    def body(run: Run) -> list[Any]:
        run.prepare(net(), shares=[3, 1], train=False)
        kept = run.prepare(batches(8, 8))
        own = run.prepare(batches(8, 8), shares=[1, 1], train=True)
        rows = [len(x) for x, _ in kept]
        return [kept.terms.train, own.terms.train, rows, own.terms.shares(8)]

    assert workers(2, body) == [[False, True, [6], (4, 4)], [False, True, [2], (4, 4)]]


def test_what_is_for_streams_is_kept_for_streams() -> None:
    class Counting(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    def body(run: Run) -> list[str | None]:
        run.prepare(net(), shard="none")
        return [
            run.prepare(loader).terms.shard for loader in (batches(), DataLoader(Counting(), 4))
        ]

    assert workers(2, body) == [[None, "none"]] * 2


def test_batchnorm_said_before_the_model() -> None:
    def body(run: Run) -> int:
        run.prepare(batches(), batchnorm="local")
        model = run.prepare(net(nn.BatchNorm1d(5)))
        return sum(
            "forward" in vars(module) or type(module) is not nn.BatchNorm1d
            for module in model
            if isinstance(module, nn.BatchNorm1d)
        )

    assert workers(2, body) == [0, 0]


def test_a_call_with_a_loader_speaks_for_that_one() -> None:
    def body(run: Run) -> list[bool | None]:
        first = run.prepare(net(), batches(), train=False)[1]
        return [loader.terms.train for loader in (first, run.prepare(batches()))]

    assert workers(2, body) == [[False, None]] * 2


def test_a_later_call_wins() -> None:
    wishes, nothing = PrepareOptions(), dict.fromkeys(DEFAULTS)
    wishes.resolve_options(
        {**nothing, "loss": "sum", "train": False}, 2, loaders=False, models=True
    )
    assert (
        wishes.resolve_options({**nothing, "train": True}, 2, loaders=True, models=False)["train"]
        is True
    )
    assert wishes.resolve_options(nothing, 2, loaders=True, models=False)["train"] is False
    found = wishes.resolve_options({**nothing, "weigh": len}, 2, loaders=True, models=False)
    assert (found["loss"], found["weigh"]) == ("mean", len)  # a weight is of a mean
    wishes.resolve_options({**nothing, "weigh": len}, 2, loaders=False, models=False)
    assert wishes.resolve_options(nothing, 2, loaders=True, models=False)["loss"] == "mean"
    found = wishes.resolve_options({**nothing, "loss": "sum"}, 2, loaders=True, models=False)
    assert (found["loss"], found["weigh"]) == ("sum", None)


@pytest.mark.parametrize("wrong", [{"loss": "total"}, {"shares": [1, 2, 3]}, {"batchnorm": "none"}])
def test_what_no_loader_can_be_dealt_by_is_refused_where_it_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises((UsageError, DataError)):
        workers(2, lambda run: run.prepare(net(), **wrong))


# ---- parameters that come into an optimizer later


@pytest.mark.parametrize("where", ["loose", "another model", "the same group"])
def test_parameters_that_an_optimizer_gets_later_are_named_until_they_are_prepared(
    where: str,
) -> None:
    def body(run: Run, again: bool) -> Tensor:
        model = net()
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), batches(40, 8)
        )
        extra: nn.Module = nn.Linear(2, 2).double()
        scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        with torch.no_grad():
            extra.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        for number, (x, y) in enumerate(loader):
            if number == 1:
                if where == "the same group":
                    opt.param_groups[0]["params"].append(scale)
                else:
                    opt.add_param_group(
                        {"params": extra.parameters() if where == "another model" else [scale]}
                    )
                if again:
                    run.prepare(model, opt)
            opt.zero_grad()
            found = model(x) * scale
            F.mse_loss(extra(found) if where == "another model" else found, y).backward()
            opt.step()
        return torch.cat([parameters(model, extra), scale.detach()])

    with pytest.raises(
        UsageError,
        match=(
            r"the parameter optimizer0\.group\d\.\d was added to the SGD after run\.prepare "
            r"\(add_param_group\)"
        ),
    ):
        workers(2, lambda run: body(run, False))
    wanted = alone(lambda run: body(run, True))
    for found in workers(2, lambda run: body(run, True)):
        assert distance(found, wanted) < 1e-12


def test_a_group_of_parameters_that_are_exchanged_may_come_later() -> None:
    """Gradual unfreezing: they are in the model, which was prepared."""

    def body(run: Run) -> Tensor:
        model = net()
        opt = torch.optim.SGD(model[1].parameters(), lr=0.05)  # type: ignore[index]
        model, opt, loader = run.prepare(model, opt, batches(40, 8))
        for number, (x, y) in enumerate(loader):
            if number == 2:
                opt.add_param_group({"params": model[0].parameters()})
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        return parameters(model)

    wanted = alone(body)
    for found in workers(2, body):
        assert distance(found, wanted) < 1e-12


def test_on_servers_an_optimizer_that_gets_a_group_is_prepared_again() -> None:
    def body(run: Run) -> None:
        model = net()
        opt = torch.optim.SGD(model[1].parameters(), lr=0.05)  # type: ignore[index]
        model, opt, loader = run.prepare(model, opt, batches(40, 8))
        for number, (x, y) in enumerate(loader):
            if number == 2:
                opt.add_param_group({"params": model[0].parameters()})
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()

    with pytest.raises(
        UsageError,
        match=r"the parameter 0\.weight was added to the SGD after .* give the optimizer",
    ):
        workers(2, body, strategy=ParameterServer())


@pytest.mark.parametrize("which", [0, 1, 2])
def test_servers_take_an_optimizer_of_some_of_the_parameters(which: int) -> None:
    """All three layers have the same shape, so a gradient that goes to another one would not be
    noticed.
    """

    def body(run: Run) -> Tensor:
        model = nn.Sequential(
            nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)
        ).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
        opt = torch.optim.SGD(model[2 * which].parameters(), lr=0.05)
        model, opt, loader = run.prepare(model, opt, batches(19, 6))
        for x, y in loader:
            model.zero_grad()
            F.mse_loss(model(x)[:, :2], y).backward()
            opt.step()
        return parameters(model)

    wanted = alone(body)
    for found in workers(2, body, strategy=ParameterServer()):
        assert distance(found, wanted) < 1e-12


def test_shares_of_the_command_line_replace_those_of_the_script() -> None:
    def heard(text: str | None) -> Any:
        return PrepareOptions(text).resolve_options(
            {"shares": [1, 3]}, 2, loaders=True, models=False
        )["shares"]

    assert [heard(None), heard("auto"), heard("2,1")] == [[1, 3], "auto", (2.0, 1.0)]
    with pytest.raises(DataError, match="3 numbers for 2 workers"):
        heard("2,1,1")
