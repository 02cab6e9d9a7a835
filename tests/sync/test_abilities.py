"""What a strategy has to be, what only some can, and who asks."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.replicas.compare import Comparison
from paceline.session.run import Run
from paceline.sync import abilities
from paceline.sync.allreduce import AllReduceSync
from paceline.sync.base import Slot, Strategy, Sync
from paceline.sync.context import SyncContext
from tests.harness.runs import alone, batches, distance, parameters, workers
from tests.harness.sources import TOGETHER, parsed

PACKAGE = Path(pl.__file__).parent
CORE = {
    "attach",
    "take_gradient",
    "end_backward",
    "commit",
    "abort",
    "detach",
    "state_dict",
    "load_state_dicts",
}
FLAGS = {"replicas_diverge", "exchanges_in_backward"}
CAN = {
    name
    for name, ability in vars(abilities).items()
    if getattr(ability, "_is_runtime_protocol", False)
}


def ready(run: Run) -> Any:
    model, generator = (
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double(),
        torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        # workers are threads here, and torch's own generator is the same for all of them
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches())


def advance(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()


def members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_a_strategy_is_a_core_of_eight() -> None:
    assert members(Sync) == CORE | FLAGS


class Bare:
    """A strategy with nothing but the core: `AllReduceSync`, and whoever asks for more finds
    nothing.
    """

    replicas_diverge = False
    exchanges_in_backward = True

    def __init__(self, inner: AllReduceSync) -> None:
        self._inner = inner

    def attach(self, slots: Sequence[Slot]) -> None:
        self._inner.attach(slots)

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        self._inner.take_gradient(number, grad, scale)

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        return [(number, mean.clone()) for number, mean in self._inner.end_backward(where)]

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()

    def detach(self) -> None:
        self._inner.detach()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        self._inner.load_state_dicts(states)


class BareAllReduce:
    def begin(self, context: SyncContext) -> Bare:
        return Bare(pl.AllReduce().begin(context))


def test_the_core_is_enough_to_train_evaluate_compare_save_and_resume(tmp_path: Path) -> None:
    def train(run: Run) -> dict[str, Tensor]:
        model, opt, loader = ready(run)
        for _ in run.epochs(1):
            for x, y in loader:
                advance(model, opt, x, y)
        with torch.no_grad():
            for x, _ in loader:
                model(x)
        run.save()
        found = parameters(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert run.resume(run.folder.path)
        assert distance(parameters(model), found) == 0
        return found

    assert (
        workers(2, lambda run: run._own.abilities, strategy=BareAllReduce())
        == [abilities.Abilities()] * 2
    )
    assert (
        distance(
            workers(2, train, strategy=BareAllReduce(), comparison=Comparison(1))[0], alone(train)
        )
        < 1e-12
    )


REMOTE = ("remote", "clipping", "unlocked", "keeping", "reports")
ABLE: list[tuple[Strategy, set[str]]] = [
    (pl.AllReduce(), {"recoverable", "unreplicated", "lender"}),
    (
        pl.LocalSGD(4),
        {"observer", "converging", "replicated", "recoverable", "unreplicated", "lender"},
    ),
    (pl.Gossip(), {"observer", "converging", "recoverable"}),
    (pl.ParameterServer(), {"converging", "recoverable", *REMOTE}),
    (
        pl.Sequence((pl.AllReduce(), "local"), (pl.LocalSGD(4), "host")),
        {"observer", "converging", "replicated", "recoverable", "unreplicated", "lender"},
    ),
]


@pytest.mark.parametrize(
    ("strategy", "expected"), ABLE, ids=[type(strategy).__name__ for strategy, _ in ABLE]
)
def test_what_each_strategy_can(strategy: Strategy, expected: set[str]) -> None:
    def found(run: Run) -> set[str]:
        return {name for name, ability in vars(run._own.abilities).items() if ability is not None}

    assert workers(2, found, strategy=strategy) == [expected, expected]


def test_no_step_of_plain_all_reduce_asks_for_more_than_the_core() -> None:
    """Only what is named here is called between the first turn and the end, evaluation and
    `save` included.
    """
    asked: set[str] = set()

    class Watched(AllReduceSync):
        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    class Watching:
        def begin(self, context: SyncContext) -> Sync:
            made: Any = pl.AllReduce().begin(context)
            made.__class__ = Watched
            return made  # type: ignore[no-any-return]

    def train(run: Run) -> None:
        model, opt, loader = ready(run)
        asked.clear()
        for x, y in loader:
            advance(model, opt, x, y)
        run.save()

    workers(1, train, strategy=Watching())
    workers(2, train, strategy=Watching())
    assert {name for name in asked if not name.startswith("_")} <= CORE | FLAGS | {"overwrites"}


# ---- who asks

STRATEGIES = {"AllReduce", "LocalSGD", "Gossip", "ParameterServer", "Sequence"}
RUNNING = {f"{name}Sync" for name in STRATEGIES} | {"PerAxisSync", "Sync", "Strategy", *CAN}


def asks(source: str) -> list[int]:
    """The lines with an `isinstance` of a strategy, or of what only some can."""
    found = []
    for node in parsed(source).nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "isinstance"
        ):
            kinds = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            kinds |= {
                part.attr for part in ast.walk(node.args[1]) if isinstance(part, ast.Attribute)
            }
            found += [node.lineno] if kinds & (STRATEGIES | RUNNING) else []
    return found


@TOGETHER
def test_only_prepare_asks_what_a_strategy_is() -> None:
    outside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "prepare" not in path.parents]
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in outside
        if (lines := asks(path.read_text()))
    }
    assert not found, (
        f"only prepare/ may ask what a strategy is: {found}; be handed `Abilities` instead"
    )


FOREIGN = re.compile(
    (
        r"(?<!ob)server|table\b|tables\b|\blost\b|\bloss(es)?\b|\bviews? "
        r"changed|WorkerLost|LOSSES|RemoteOptimizer"
    ),
    re.IGNORECASE,
)
# what a script minimises, and no loss of a worker
TRAINED = re.compile(r"one loss|loss\.backward|\(?loss( /|\()|terms\.loss|loss=")
STEPS = ("loop/stepping.py", "loop/halving.py")  # run.step is given the script's loss
PLAIN = ["sync/base.py", "sync/allreduce.py", "sync/autograd.py"]
PLAIN += sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "loop").glob("*.py"))


@pytest.mark.parametrize("path", PLAIN)
def test_the_plain_path_knows_nothing_of_servers_tables_or_losses(path: str) -> None:
    text = (PACKAGE / path).read_text()
    trained = (
        re.compile(r"\bloss\b|\blosses of (the )?parts\b", re.IGNORECASE)
        if path in STEPS
        else TRAINED
    )
    assert not [line for line in text.splitlines() if FOREIGN.search(trained.sub("", line))]


def test_the_core_is_short() -> None:
    assert len((PACKAGE / "sync/base.py").read_text().splitlines()) < 160
