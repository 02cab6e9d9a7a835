"""Ordinary loops give with several workers what they give in one plain process: each of them
written as people write them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from paceline.errors import PacelineError
from paceline.record.logged.values import RESERVED_FIELDS
from paceline.servers.worker.strategy import ParameterServer
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.runs import workers
from tests.loops import (
    collection,
    data,
    evaluating,
    further,
    gradients,
    models,
    optimizers,
    several,
)
from tests.loops.collection import LOOPS, Loop, Plain, Taken, differences, everything, flat, plain
from tests.loops.script import TENTHS

# they fill LOOPS
assert data and evaluating and further and gradients and models and optimizers and several
SIZES = (1, 2, 3, 4)
APART = [
    "in_order",
    "a_batch_sampler_of_uneven_batches",
    "two_losses_backward_apart",
    "a_sum_over_samples",
    "weights_by_tokens",
    "batch_norm",
    "packed_sequences",
    "parameters_used_by_some_shares",
    "layers_thawed_in_mid_run",
    "tied_weights",
    "scheduled_by_step",
    "validation_after_each_epoch",
    "some_batches_skipped",
    "gradients_cloned",
    "a_penalty_backward_apart",
]
SERVED = [
    "in_order",
    "a_batch_sampler_of_uneven_batches",
    "two_losses_backward_apart",
    "a_sum_over_samples",
    "clipping_by_the_runs_own",
    "several_optimizers_for_one_model",
    "complex_parameters",
    "parameters_used_by_some_shares_and_adam",
    "stepped_by_adamw",
    "scheduled_by_one_cycle",
    "validation_within_an_epoch",
    "tied_weights",
    "accumulation_without_exchange",
    "zero_grad_that_keeps_tensors",
    "a_gan",
    "a_gan_that_makes_first",
    "rates_set_by_hand",
]


def weights(found: Any) -> list[tuple[str, Any]]:
    """The models alone: what optimizers remember lies elsewhere."""
    return [
        part
        for model in (found if isinstance(found, tuple) else (found,))
        if isinstance(model, nn.Module)
        for part in flat(model)
    ]


def logged(path: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step."""
    found: dict[int, dict[str, float]] = {}
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        mine = {name: float(value) for name, value in values.items() if name not in RESERVED_FIELDS}
        found.setdefault(values["step"], {}).update(mine)
    return {step: values for step, values in found.items() if values}


def by_step(values: dict[int, dict[str, float]]) -> list[tuple[str, Any]]:
    """What was logged, in order."""
    return list(
        flat({str(step): dict(sorted(found.items())) for step, found in sorted(values.items())})
    )


# what one plain process comes to, made when it is asked for
Wanted = Callable[[], tuple[list[tuple[str, Any]], Plain]]


def wanted_of(known: Loop, taken: Taken = everything) -> Wanted:
    """One plain process, for any number of comparisons."""
    return functools.cache(lambda: plain(known, taken))


def check(
    known: Loop,
    size: int,
    folder: Path,
    strategy: Strategy | None = None,
    taken: Taken = everything,
    *,
    wanted: Wanted | None = None,
) -> None:
    """`size` workers come to what one plain process comes to, all of them; or it is refused."""
    said: list[str] = []
    runs: list[Any] = []

    def body(run: Any) -> Any:
        if run.rank == 0:
            runs.append(run)
        return taken(known.body(run))

    try:
        found = workers(size, body, folder=folder, said=said, strategy=strategy, deadline=60)
    except PacelineError as error:
        assert known.refused and known.refused in str(error), str(error)
        return
    assert size == 1 or not known.refused, "it isn't refused"
    end, one = (wanted or wanted_of(known, taken))()
    for rank, mine in enumerate(found):
        assert differences(mine, end, known.near) == [], f"rank {rank} of {size}"
    if known.said and size > 1:
        assert any(known.said in line for line in said), said
    if known.counted and taken is everything:
        assert runs[0].steps == one.steps_made
        written, expected = by_step(logged(runs[0].folder.path)), by_step(one.means())
        assert differences(written, expected, max(known.near, 1e-8)) == []


def marked(names: list[str]) -> list[Any]:
    """Parameters of a test: those that aren't right yet are marked."""
    waiting = {
        name: [pytest.mark.xfail(reason=LOOPS[name].pending, strict=False)]
        if LOOPS[name].pending
        else []
        for name in names
    }
    return [pytest.param(name, marks=marks) for name, marks in waiting.items()]


THREADED = [name for name, known in LOOPS.items() if not known.threads]


@pytest.mark.parametrize("name", marked(THREADED))
def test_a_loop_of_many_workers_is_that_of_one(name: str, tmp_path: Path) -> None:
    """Three workers have uneven shares and ghosts; two train every fourth loop too, and what
    several refuse must run on one.
    """
    wanted, place = wanted_of(LOOPS[name]), THREADED.index(name)
    beside = (1,) if LOOPS[name].refused else (2,) if place % 4 == 0 else ()
    for size in (*beside, 3):
        check(LOOPS[name], size, tmp_path / str(size), wanted=wanted)


@pytest.mark.soak
@pytest.mark.parametrize("name", marked(THREADED))
def test_a_loop_of_any_number_of_workers_is_that_of_one(name: str, tmp_path: Path) -> None:
    for size in SIZES:
        check(LOOPS[name], size, tmp_path / str(size))


UNSERVED = {
    "an_optimizer_replaced_and_prepared": "a parameter keeps its first optimizer",
    "an_optimizer_made_each_epoch": "a parameter keeps its first optimizer",
    "an_optimizer_loaded_from_a_run_before": "load it before run.prepare",
    "accumulation_by_hand": "but the last under run.no_sync()",
    "a_loss_divided_by_the_length_of_the_loader": "but the last under run.no_sync()",
    "zero_grad_of_now_and_then": "but the last under run.no_sync()",
    "folds": "belong to a new model",
    "layers_thawed_in_mid_run": "with requires_grad=True",
    "sparse_embeddings_with_sgd": "leave out sparse=True",
    "a_scaler_that_grows_and_skips": "GradScaler",
}


# two of three in a soak
WAYS = [*(("ring", name) for name in TENTHS[::10]), *(("native", name) for name in TENTHS[5::10])]


@pytest.mark.parametrize(
    ("via", "name"),
    [pytest.param(*way, marks=pytest.mark.soak if n % 3 else ()) for n, way in enumerate(WAYS)],
)
def test_whatever_way_gradients_are_summed(via: Any, name: str, tmp_path: Path) -> None:
    check(LOOPS[name], 3, tmp_path, AllReduce(via=via, bucket_mb=0.0002))


@pytest.mark.parametrize("name", APART)
def test_rounds_of_one_step_are_an_exchange_of_gradients(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum is each worker's own, and no sum of samples: it is left out."""
    monkeypatch.setattr(collection, "SGD", lambda parameters, lr, momentum: SGD(parameters, lr))
    check(LOOPS[name], 3, tmp_path, LocalSGD(every=1), weights)


@pytest.mark.parametrize("name", SERVED)
def test_steps_on_servers_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    check(LOOPS[name], 3, tmp_path, ParameterServer(), weights)


@pytest.mark.parametrize("name", UNSERVED)
def test_what_servers_cannot_do_is_refused(name: str, tmp_path: Path) -> None:
    check(LOOPS[name]._replace(refused=UNSERVED[name]), 2, tmp_path, ParameterServer(), weights)
