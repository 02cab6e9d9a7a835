"""Sparse tables in whole runs on threads: the same numbers as nn.EmbeddingBag with the same
optimizer in one process.
"""

from __future__ import annotations

import copy
import json
import random
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.errors import DeadlineExceeded, UsageError
from paceline.replicas.compare import Comparison
from paceline.servers.process import row_optimizers
from paceline.servers.tables.embedding import SparseEmbedding
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.runs import alone, cut, distance, parameters, workers
from tests.harness.tables import (
    DIM,
    OPTIMIZERS,
    ROWS,
    Make,
    Net,
    data,
    everything,
    loader,
    one,
    plain,
    served,
    step,
    train,
)


def several(
    size: int, servers: int, kind: str, *, strategy: Any = None, delay: Any = None, **options: Any
) -> Tensor:
    found = workers(
        size,
        lambda run: train(run, served(servers), kind, **options),
        strategy=strategy,
        delay=delay,
    )
    assert all(torch.equal(other, found[0]) for other in found), "all workers read the same"
    return found[0]


FEW = [
    (1, 1, "adagrad", "mean"),
    (2, 1, "sgd", "sum"),
    (3, 2, "adam", "mean"),
    (4, 3, "adagrad", "sum"),
    (2, 3, "groups", "mean"),
]
ALL = product((1, 2, 3, 4), (1, 2, 3), OPTIMIZERS, ("sum", "mean"))


@pytest.mark.parametrize(
    ("size", "servers", "kind", "mode"),
    [pytest.param(*c, marks=() if c in FEW else pytest.mark.soak) for c in ALL],
)
def test_numbers_are_those_of_embedding_bag(size: int, servers: int, kind: str, mode: str) -> None:
    """8 steps of 8 samples, of 4 at the ends of epochs: 3 workers have uneven shares."""
    assert distance(several(size, servers, kind, mode=mode), one(kind, mode=mode)) < 1e-9


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_in_float32(kind: str) -> None:
    wanted = one(kind, dtype=torch.float32)
    assert distance(several(3, 2, kind, dtype=torch.float32), wanted) < 1e-5


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "options",
    [
        {"shares": cut(1, 5, 2), "weigh": lambda batch: 3.0 * len(batch[0])},
        {"count": 42},  # two samples are left for three workers: one is a ghost
        {"rate": 0.5},
        {"shares": cut(1, 5, 2)},
        {"shares": cut(0, 3, 5)},
    ],
)
# adam moves rows whose gradient is zero
@pytest.mark.parametrize("kind", [pytest.param("adagrad", marks=pytest.mark.soak), "adam"])
def test_shares_and_schedules(kind: str, options: Any) -> None:
    apart = {name: value for name, value in options.items() if name in ("count", "rate")}
    assert distance(several(3, 2, kind, **options), one(kind, **apart)) < 1e-9


def test_with_random_delays_repeatedly() -> None:
    wanted, chance = several(3, 2, "adam", count=20), random.Random(1)
    for _ in range(2):
        assert torch.equal(
            several(3, 2, "adam", count=20, delay=lambda rank: time.sleep(chance.random() * 0.01)),
            wanted,
        )


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_beside_a_parameter_server(kind: str) -> None:
    assert distance(several(2, 2, kind, strategy=ParameterServer(servers=1)), one(kind)) < 1e-9


def test_beside_strategies_in_which_replicas_part() -> None:
    """Tables stay in lockstep, with the mean over all workers, while dense replicas part between
    rounds.
    """
    wanted = one("sgd")
    assert 1e-9 < distance(several(2, 2, "sgd", strategy=LocalSGD(every=4)), wanted) < 0.3
    assert distance(several(2, 2, "sgd", strategy=Gossip()), wanted) < 1e-9, (
        "of two workers, and with SGD, it is the mean"
    )
    assert distance(several(2, 2, "sgd", strategy=LocalSGD(every=1)), wanted) < 1e-9


class TestLoops:
    """Steps that are more than forward, backward and step."""

    def both(self, each: Callable[..., None], kind: str = "adagrad", size: int = 3) -> None:
        assert distance(several(size, 2, kind, each=each), one(kind, each=each)) < 1e-9

    def test_two_losses(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, **_: Any) -> None:
            (model(*batch[:2]) ** 2).mean().backward()
            step(model, optimizers, batch)

        for kind in ("sgd", "adam"):
            self.both(each, kind)

    def test_a_table_without_a_gradient(self) -> None:
        """Its count of steps stands still."""

        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            model.second.weight.requires_grad_(run.steps % 2 == 0)
            step(model, optimizers, batch)
            model.second.weight.requires_grad_(True)

        self.both(each, "adam")

    def test_gradients_that_are_kept(self) -> None:
        """zero_grad comes every other step."""

        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            if run.steps % 2 == 0:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            F.mse_loss(model(*batch[:2]), batch[2]).backward()
            for optimizer in optimizers:
                optimizer.step()

        self.both(each, "sgd")

    def test_a_step_every_other_batch(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            last = run.steps % 2 == 1
            if last:
                F.mse_loss(model(*batch[:2]), batch[2]).backward()
            else:
                with run.no_sync():
                    F.mse_loss(model(*batch[:2]), batch[2]).backward()
            for optimizer in optimizers if last else ():
                optimizer.step()
                optimizer.zero_grad()

        self.both(each, size=2)

    def test_a_closure(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, **_: Any) -> None:
            def closure() -> Tensor:
                optimizers[0].zero_grad()
                loss = F.mse_loss(model(*batch[:2]), batch[2])
                loss.backward()
                return loss

            assert optimizers[0].step(closure) > 0

        self.both(each)

    def test_evaluation_in_between_makes_no_rows(self) -> None:
        counts = []

        def each(model: nn.Module, optimizers: list[Any], batch: Any, **_: Any) -> None:
            a, b, _ = batch
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    if not grad and isinstance(model.first, SparseEmbedding):
                        lookup = model.first.source._lookup
                        before = lookup.summarize_rows()["rows"]
                        model((a + 7) % ROWS, (b + 7) % ROWS)
                        counts.append(lookup.summarize_rows()["rows"] - before)
                    elif not grad:
                        model((a + 7) % ROWS, (b + 7) % ROWS)
            step(model, optimizers, batch)

        self.both(each)
        assert counts and not any(counts)


def test_a_model_of_tables_alone() -> None:
    """No dense parameter tells the run of a backward."""

    class Tables(nn.Module):
        def __init__(self, make: Make) -> None:
            super().__init__()
            self.table = make(mode="sum", seed=1)

        def forward(self, a: Tensor) -> Tensor:
            return self.table(a)

    def body(run: Run, make: Make) -> Tensor:
        model = Tables(make)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        model, optimizer, batches = run.prepare(model, optimizer, loader())
        for a, _, y in batches:
            F.mse_loss(model(a)[:, :2], y).backward()
            optimizer.step()
            optimizer.zero_grad()
        table = model.table
        return (
            table.lookup(torch.arange(ROWS))
            if isinstance(table, SparseEmbedding)
            else table.weight.detach()
        )

    wanted = alone(lambda run: body(run, plain()))
    for strategy in (None, ParameterServer(), LocalSGD(every=2)):
        found = workers(2, lambda run: body(run, served(dtype=torch.float64)), strategy=strategy)
        assert distance(found[0], wanted) < 1e-9


class TestPrefetch:
    @staticmethod
    def body(run: Run, *, ahead: bool, wrong: bool = False) -> tuple[Tensor, int]:
        model = Net(served(), torch.float64, "mean")
        optimizers = OPTIMIZERS["adam"](model)
        batches = list(DataLoader(data(), 4))
        model, *optimizers = run.prepare(model, *optimizers)
        for number in range(10):
            a, b, y = batches[number]
            if number % 5 == 4:  # something that was asked for in vain
                model.first.prefetch((a + 1) % ROWS)
            loss = F.mse_loss(model(a, b), y)
            if ahead:
                c, d, _ = batches[number + 1]
                # more than will be used
                model.first.prefetch((c + 1) % ROWS if wrong else torch.cat([c, a]))
                model.second.prefetch(d)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return everything(model), model.first.source._lookup.blocking_pulls

    def test_numbers_are_the_same_and_waits_fewer(self) -> None:
        for size in (1, 3):
            found, waits = workers(size, lambda run: self.body(run, ahead=True))[0]
            wanted, usual = workers(size, lambda run: self.body(run, ahead=False))[0]
            assert torch.equal(found, wanted)
            assert usual == 11 and waits == 2, "the first batch, and what is looked up at the end"

    def test_other_rows_than_were_asked_for(self) -> None:
        found, waits = workers(2, lambda run: self.body(run, ahead=True, wrong=True))[0]
        assert (
            torch.equal(found, workers(2, lambda run: self.body(run, ahead=False))[0][0])
            and waits > 8
        )


def test_workers_without_a_common_seed_take_the_first_ones() -> None:
    said: list[str] = []

    def body(run: Run) -> Tensor:
        model = SparseEmbedding(ROWS, DIM, seed=run.rank)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return model.lookup(torch.arange(ROWS))

    found = workers(3, body, said=said)
    wanted = row_optimizers.make_initial_values(
        torch.arange(ROWS), DIM, torch.float32, seed=0, std=1.0
    )
    assert all(torch.equal(each, wanted) for each in found) and any(
        "differed from rank 0's" in text for text in said
    )


def test_replicas_are_compared_and_told_apart(tmp_path: Any) -> None:
    """The digest in the summary is of the rows, too, and doesn't depend on workers and servers."""
    found = set()
    for number, (size, servers, epochs) in enumerate([(1, 1, 2), (1, 3, 2), (1, 2, 1)]):
        folder = tmp_path / str(number)
        workers(
            size,
            lambda run, s=servers, e=epochs: train(run, served(s), epochs=e),
            folder=folder,
            comparison=Comparison(every=2),
        )
        found.add(
            (folder / "test" / "summary.json").read_text().split('"parameters_sha256": "')[1][:64]
        )
    assert len(found) == 2


def test_exchanges_of_rows_are_seen_as_such(tmp_path: Path) -> None:
    """In the summary, where a step is the sum of its parts, and in the trace, where a turn is."""
    workers(2, lambda run: train(run, served()), folder=tmp_path)
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    assert summary["step_seconds"]["exchange"] > 0
    events = json.loads((tmp_path / "test" / "trace.json").read_text())["traceEvents"]
    spans = [
        event
        for event in events
        if event["ph"] == "X" and event["cat"] in ("compute", "exchange", "step")
    ]
    assert {"rows", "gradients of rows"} <= {event["name"] for event in spans}
    for turn in [event for event in spans if event["cat"] == "step"]:
        inside = [
            e
            for e in spans
            if e["cat"] != "step" and (e["pid"], e["args"]) == (turn["pid"], turn["args"])
        ]
        assert sum(e["dur"] for e in inside) == pytest.approx(turn["dur"], abs=20)


def test_a_frozen_table_is_only_read() -> None:
    def body(run: Run, *, thaws: bool) -> Tensor:
        model = Net(served(), torch.float64, "mean")
        model.first.weight.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        model, optimizer, batches = run.prepare(model, optimizer, loader())
        model.first.weight.requires_grad_(thaws)
        for batch in batches:
            step(model, [optimizer], batch)
        return model.first.lookup(torch.arange(ROWS))

    wanted = row_optimizers.make_initial_values(
        torch.arange(ROWS), DIM, torch.float64, seed=1, std=1.0
    )
    assert torch.equal(workers(2, lambda run: body(run, thaws=False))[0], wanted)
    with pytest.raises(UsageError, match="was frozen when it was prepared"):
        workers(1, lambda run: body(run, thaws=True))


def test_tables_that_come_later() -> None:
    """They share the servers of the first."""

    def body(run: Run) -> Tensor:
        first = SparseEmbedding(ROWS, DIM, "sum", seed=1, servers=2)
        run.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
        second = SparseEmbedding(ROWS, DIM, "sum", seed=2)
        optimizer = torch.optim.SGD(second.parameters(), 1.0)
        run.prepare(second, optimizer)
        second(torch.tensor([[3, 5]])).sum().backward()
        optimizer.step()
        return second.lookup(torch.tensor([3, 4]))

    before = row_optimizers.make_initial_values(
        torch.tensor([3, 4]), DIM, torch.float32, seed=2, std=1.0
    )
    assert torch.allclose(workers(2, body)[1], before - torch.tensor([[1.0], [0.0]]))


def test_after_the_run_there_are_no_rows() -> None:
    table = alone(_prepared)
    with pytest.raises(UsageError, match="belongs to no run"):
        table.lookup(torch.tensor([1]))


def _prepared(run: Run) -> nn.Module:
    table = SparseEmbedding(ROWS, DIM)
    return run.prepare(table, torch.optim.SGD(table.parameters(), 0.1))[0]


def test_who_does_not_come_is_named() -> None:
    """A worker that steps alone waits in vain; the error says for whom, before the others notice
    anything.
    """

    named = threading.Event()

    def body(run: Run) -> None:
        model = SparseEmbedding(ROWS, DIM, servers=2)
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        if run.rank == 1:
            model(torch.tensor([[1, 2]])).sum().backward()
            optimizer.step()
            model.source._lookup._servers.await_pushes()
            run._context.deadline = 1.0
            try:
                model(torch.tensor([[1, 2]]))
            finally:
                named.set()
        else:
            named.wait(60)

    with pytest.raises(
        DeadlineExceeded, match="rows of model wait for step 1 of ranks 0, 2"
    ) as found:
        workers(3, body)
    assert found.value.missing == (0, 2)


def test_one_server_on_each_host_if_nothing_is_said() -> None:
    def body(run: Run) -> int:
        return _prepared(run).source._lookup._servers.shard_count

    assert workers(4, body, hosts=(0, 0, 1, 1)) == [2] * 4


class TestMisuse:
    def prepared(self, change: Callable[[nn.Module], Any], text: str, size: int = 2) -> None:
        def body(run: Run) -> None:
            model = Net(served(), torch.float64, "mean")
            run.prepare(model, *change(model))

        with pytest.raises(UsageError, match=text):
            workers(size, body)

    def test_of_optimizers(self) -> None:
        self.prepared(
            lambda m: [torch.optim.Adam(m.parameters())], "first is in a torch.optim.* SparseAdam"
        )
        self.prepared(
            lambda m: [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)], "first .*momentum=0.9"
        )
        self.prepared(
            lambda m: [torch.optim.SGD(m.dense.parameters(), 0.1)],
            "first is in 0 of the optimizers",
        )
        self.prepared(
            lambda m: [torch.optim.SGD(m.parameters(), 0.1), torch.amp.GradScaler("cpu")],
            "a GradScaler can't see",
        )

    def test_of_settings_that_come_later(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            optimizers[0].param_groups[0]["weight_decay"] = 0.1
            step(model, optimizers, batch)

        with pytest.raises(UsageError, match=r"weight_decay=0\.1"):
            workers(1, lambda run: train(run, served(), each=each))

    def test_of_settings_that_differ(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            optimizers[0].param_groups[0]["lr"] = 0.1 + run.rank
            step(model, optimizers, batch)

        with pytest.raises(Exception, match="with different settings"):
            workers(2, lambda run: train(run, served(), each=each))

    def test_of_clipping(self) -> None:
        def each(model: nn.Module, optimizers: list[Any], batch: Any, run: Run) -> None:
            F.mse_loss(model(*batch[:2]), batch[2]).backward()
            run.clip(model.dense, 1.0)
            run.clip(model, 1.0)

        for strategy in (None, ParameterServer()):
            with pytest.raises(
                UsageError, match=r"run\.clip can't see the gradients of the sparse table first"
            ):
                workers(2, lambda run: train(run, served(), each=each), strategy=strategy)

    @pytest.mark.parametrize("option", ["servers", "replicas"])
    def test_of_servers(self, option: str) -> None:
        def body(run: Run, *, later: bool) -> None:
            one, other = (SparseEmbedding(ROWS, DIM, **{option: count}) for count in (1, 2))
            if later:
                run.prepare(one, torch.optim.SGD(one.parameters(), 0.1))
            run.prepare(
                *([] if later else [one]),
                other,
                torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1),
            )

        for later, text in (
            (False, rf"ask for {option} \[1, 2\]"),
            (True, f"have {option}=1, and {option}=2 asks"),
        ):
            with pytest.raises(UsageError, match=text):
                workers(1, lambda run, later=later: body(run, later=later))

    def test_of_a_half_table(self) -> None:
        def body(run: Run) -> None:
            table = SparseEmbedding(ROWS, DIM).half()
            run.prepare(table, torch.optim.SGD(table.parameters(), 0.1))

        with pytest.raises(UsageError, match="float32 or float64"):
            workers(1, body)

    @pytest.mark.parametrize("strategy", [LocalSGD(every=2), Gossip()])
    def test_where_replicas_part_and_losses_are_survived(self, strategy: Any) -> None:
        def body(run: Run) -> None:
            run._prepared.survives = True
            _prepared(run)

        with pytest.raises(
            UsageError,
            match="beside AllReduce or ParameterServer, and with this strategy replicas differ",
        ):
            workers(1, body, strategy=strategy)

    def test_of_copies_where_losses_end_the_run(self) -> None:
        def body(run: Run) -> None:
            table = SparseEmbedding(ROWS, DIM, replicas=2)
            run.prepare(table, torch.optim.SGD(table.parameters(), 0.1))

        with pytest.raises(
            UsageError,
            match=r"replicas=2.* is for runs that go on when a server is lost: .*--min-workers",
        ):
            workers(1, body)

    def test_of_copies(self) -> None:
        def body(run: Run) -> None:
            copy.deepcopy(_prepared(run))(torch.tensor([[1]]))

        with pytest.raises(UsageError, match="a copy of a prepared model"):
            workers(1, body)


def test_parameters_are_those_that_were_given() -> None:
    """Handles have no values: what is said of parameters is said of the dense ones."""
    assert parameters(Net(served(), torch.float64, "mean")).numel() == 2 * DIM * 2 + 2
