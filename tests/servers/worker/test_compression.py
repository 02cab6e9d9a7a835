"""A parameter server through codecs, in whole runs on threads: equal workers, nothing lost for
good, fewer bytes.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.codec.codec import after, error_feedback, named, smaller, where
from paceline.codec.coding import compose, exact
from paceline.codec.dense import half, int8, sign
from paceline.codec.sparse import randomk, topk
from paceline.servers.protocol.message import call_server
from paceline.servers.protocol.parameters import PullUnit
from paceline.servers.worker.client import ParameterServerSync
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.runs import Numbered, alone, batches, cut, distance, parameters, workers

FINE = error_feedback(int8())
COARSE = error_feedback(topk(0.1))


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    made = nn.Sequential(
        nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 80), nn.Tanh(), nn.Linear(80, 2)
    )
    generator = torch.Generator().manual_seed(3)  # threads share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return made.to(dtype)


def served(
    codec: Any, servers: int = 2, bucket_mb: float = 0.05, **options: Any
) -> ParameterServer:
    return ParameterServer(servers=servers, bucket_mb=bucket_mb, codec=codec, **options)


def client(run: Run) -> ParameterServerSync:
    sync = run._backward.sync
    assert isinstance(sync, ParameterServerSync)
    return sync


def prepared(
    run: Run,
    lr: float = 0.02,
    momentum: float = 0.9,
    *,
    model: Any = net,
    dtype: Any = torch.float32,
    **options: Any,
) -> Any:
    made = model()
    return run.prepare(
        made,
        torch.optim.SGD(made.parameters(), lr, momentum=momentum),
        batches(dtype=dtype),
        **options,
    )


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(
    run: Run,
    epochs: int = 4,
    *,
    losses: list[float] | None = None,
    dtype: Any = torch.float32,
    **options: Any,
) -> list[Tensor]:
    """The parameters after each step, and in the end."""
    model, optimizer, loader = prepared(run, dtype=dtype, model=lambda: net(dtype), **options)
    found = []
    for _ in run.epochs(epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(parameters(model))
            if losses is not None:
                losses.append(loss.item())
    client(run).converge()
    return [*found, parameters(model)]


def last(codec: Any, size: int = 3, **options: Any) -> Tensor:
    """What all come to, equal after each step."""
    found = workers(size, lambda run: train(run, **options), strategy=served(codec))
    for other in found[1:]:
        assert all(torch.equal(one, mine) for one, mine in zip(found[0], other, strict=True))
    return found[0][-1]


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_a_codec_that_loses_nothing_changes_nothing(dtype: torch.dtype) -> None:
    plain = last(None, 2, dtype=dtype, epochs=1)
    for codec in (exact(), where(smaller(10**9), exact(), int8()), after(10**6, FINE)):
        assert torch.equal(last(codec, 2, dtype=dtype, epochs=1), plain)
    assert 0 < distance(last(half(), 2, dtype=dtype, epochs=1), plain) < 1e-3


@functools.cache
def unevenly(codec: Any) -> Tensor:
    """What workers of uneven shares come to in two epochs."""
    return last(codec, shares=cut(1, 2, 5), epochs=2)


CODECS = [
    FINE,
    int8(64, "stochastic"),
    COARSE,
    error_feedback(sign()),
    error_feedback(randomk(0.3)),
    error_feedback(compose(topk(0.2), int8())),
    where(smaller(100), exact(), COARSE),
    where(named("*.bias"), half(), int8()),
    after(5, COARSE, before=half()),
]


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "codec",
    [pytest.param(c, marks=pytest.mark.slow if n % 4 else ()) for n, c in enumerate(CODECS)],
    ids=repr,
)
def test_workers_are_equal_after_each_step(codec: Any) -> None:
    found = unevenly(codec)
    assert bool(found.isfinite().all()) and 0 < distance(found, unevenly(None)) < 0.3


@pytest.mark.slow
def test_the_loss_is_that_of_exact_gradients() -> None:
    """60 steps of int8; of topk, that it gets there."""
    curves: dict[Any, list[float]] = {None: [], FINE: [], COARSE: []}
    for each, losses in curves.items():
        # a message a step: how much is in one is not what is looked at
        strategy = served(each, servers=1, bucket_mb=1)
        workers(
            2,
            lambda run, into=losses: train(run, 12, losses=[] if run.rank else into, lr=0.015),
            strategy=strategy,
        )
    plain = torch.tensor(curves[None])
    assert len(plain) == 60 and float(plain[-20:].mean()) < 0.2 * float(plain[:5].mean())
    for codec, off, end in ((FINE, 0.01, 0.2), (COARSE, math.inf, 0.4)):
        coded = torch.tensor(curves[codec])
        assert float((coded - plain).abs().max()) < off * float(plain[:5].mean())
        assert float(coded[-20:].mean()) < end * float(plain[:5].mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_sent_when_it_becomes_exact(dtype: torch.dtype) -> None:
    def body(run: Run) -> list[bool]:
        model, optimizer, loader = prepared(run, model=lambda: net(dtype), dtype=dtype)
        found = []
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(
                any(
                    bool(r.any())
                    for r in client(run).link.codec.get_residuals(client(run).link.slots)
                    if r is not None
                )
            )
        return found

    assert (
        workers(2, body, strategy=served(after(3, exact(), before=COARSE)))
        == [[True] * 3 + [False] * 2] * 2
    )


class Branches(nn.Module):
    """A part that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = net(torch.float64), net(torch.float64)

    def forward(self, x: Tensor, *, some: bool) -> Tensor:
        return self.always(x) + (self.some(x) if some else 0)


def settled(run: Run, some: Any = None, steps: int = 6, **options: Any) -> tuple[Tensor, Tensor]:
    """By plain SGD with a rate of 1/8: what all gradients came to; what was taken from the
    parameters, by the rate, and what is kept.
    """
    kind = Branches if some else lambda: net(torch.float64)
    model, optimizer, loader = prepared(run, 0.125, 0.0, model=kind, dtype=torch.float64, **options)
    before, given, taken = parameters(model), 0.0, 0
    for _ in run.epochs(9):
        for x, y in loader:
            out = model(x) if some is None else model(x, some=some(run.rank, taken))
            (F.mse_loss(out, y) * 0.02).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            given = (
                given
                + torch.cat([g.reshape(-1) for g in grads]).double()
                * client(run).context.step_state.share_of_step
            )
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
            if taken == steps:
                break
        if taken == steps:
            break
    client(run).commit()  # as the loader does it
    assert not client(run).link.codec._stepped_residuals
    client(run).converge()
    kept = client(run).link.codec.get_residuals(client(run).link.slots)
    left = torch.cat(
        [
            torch.zeros(p.numel()) if r is None else r.reshape(-1)
            for p, r in zip(model.parameters(), kept, strict=True)
        ]
    )
    return torch.as_tensor(given), (before - parameters(model)) / 0.125 / run.size + left.double()


def now_and_then(rank: int, step: int) -> bool:
    """Whether this worker uses a part of its model: no worker does in each fifth step."""
    return step % 5 not in (0, rank)


@pytest.mark.parametrize(
    ("codec", "some"),
    [
        (COARSE, now_and_then),
        (error_feedback(sign()), None),
        (error_feedback(randomk(0.2)), now_and_then),
    ],
    ids=lambda each: getattr(each, "__name__", repr(each)),
)
def test_what_was_applied_and_what_is_kept_is_all_that_was_given(codec: Any, some: Any) -> None:
    """By uneven shares; and with parameters that some, or all, leave out."""
    found = workers(3, lambda run: settled(run, some, shares=cut(1, 2, 5)), strategy=served(codec))
    given, arrived = (torch.stack(column).sum(0) for column in zip(*found, strict=True))
    assert float((given - arrived).norm()) < 1e-6 * float(given.norm())


def loop(each: Any, codec: Any = COARSE, size: int = 2, **options: Any) -> Tensor:
    """Five steps of `each(model, optimizer, (x, y), step)`."""

    def body(run: Run) -> Tensor:
        model, optimizer, loader = prepared(run, **options)
        for step, batch in enumerate(loader):
            each(model, optimizer, batch, step)
            optimizer.zero_grad()
        return parameters(model)

    found = workers(size, body, strategy=served(codec)) if size > 1 else [alone(body)]
    assert all(torch.equal(other, found[0]) for other in found)
    return found[0]


def test_what_is_changed_after_it_was_pushed_is_encoded_from_the_same_residual() -> None:
    def once(model: Any, optimizer: Any, batch: Any, step: int) -> None:
        (F.mse_loss(model(batch[0]), batch[1]) * 0.5).backward()
        optimizer.step()

    def twice(model: Any, optimizer: Any, batch: Any, step: int) -> None:
        F.mse_loss(model(batch[0]), batch[1]).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()

    def thrown_away(model: Any, optimizer: Any, batch: Any, step: int) -> None:
        (model(batch[0]) ** 4).mean().backward()
        optimizer.zero_grad()
        once(model, optimizer, batch, step)

    wanted = loop(once)
    assert torch.equal(wanted, loop(twice)) and torch.equal(wanted, loop(thrown_away))


def test_clipping_and_two_steps_in_a_turn() -> None:
    def body(run: Run) -> Tensor:
        model, optimizer, loader = prepared(run)
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            run.clip(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    plain = workers(2, body, strategy=served(None))[0]
    assert 0 < distance(workers(2, body, strategy=served(FINE))[0], plain) < 1e-3

    def again(model: Any, optimizer: Any, batch: Any, step: int) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()

    assert distance(loop(again, FINE), loop(again, None)) < 3e-3


def test_a_hand_written_accumulation() -> None:
    def body(run: Run, codec: Any) -> Tensor:
        model, optimizer, loader = prepared(run)
        for step, (x, y) in enumerate(loader):
            if step % 2:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                continue
            with run.no_sync():
                F.mse_loss(model(x), y).backward()
        return parameters(model)

    fine, plain = (
        workers(2, lambda run, codec=codec: body(run, codec), strategy=served(codec))[0]
        for codec in (FINE, None)
    )
    assert 0 < distance(fine, plain) < 1e-3


def test_bytes_of_pushes() -> None:
    """Gradients travel coded, and parameters exactly."""

    def body(run: Run) -> tuple[int, int]:
        model, optimizer, loader = prepared(run)
        found = []
        for step, (x, y) in enumerate(loader):
            if step in (1, 4):
                run.barrier()
                facts = client(run).facts() if run.rank == 0 else [{"bytes_sent": 0}]
                run.barrier()
                found.append(
                    (
                        client(run).link.connections.traffic.between,
                        sum(fact["bytes_sent"] for fact in facts),
                    )
                )
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return found[1][0] - found[0][0], found[1][1] - found[0][1]

    numel = parameters(net()).numel()
    for codec, wanted in (
        (None, 1.0),
        (int8(), 0.25),
        (COARSE, 0.2),
        (error_feedback(topk(0.01)), 0.02),
    ):
        (pushed, pulled), _ = workers(2, body, strategy=served(codec, servers=1))
        whole = 3 * 4 * numel
        assert wanted * whole < pushed + 500 < wanted * whole + 0.03 * whole, (
            codec,
            pushed / whole,
        )
        assert whole < pulled / 2 + 500 < 1.03 * whole, (codec, pulled / 2 / whole)


FREE: dict[str, dict[str, Any]] = {
    "stale": {"staleness": 2},
    "alone": {"staleness": math.inf},
    "backups": {"backup_workers": 1},
}


@pytest.mark.parametrize("mode", FREE)
def test_out_of_lockstep_it_gets_there(mode: str, tmp_path: Path) -> None:
    """All come to the servers' values, exactly."""
    one, other = workers(
        2, lambda run: train(run, 8, lr=0.01), strategy=served(FINE, **FREE[mode]), folder=tmp_path
    )
    assert torch.equal(one[-1], other[-1])
    data, model = Numbered(dtype=torch.float32), net()
    before = float(F.mse_loss(model(data.x), data.y).detach())
    nn.utils.vector_to_parameters(one[-1].float(), model.parameters())
    # half of all is dropped there
    assert float(F.mse_loss(model(data.x), data.y).detach()) < before * (
        0.8 if mode == "backups" else 0.2
    )
    (verdict,) = json.loads((tmp_path / "test" / "summary.json").read_text())["codecs"]
    assert 0.24 * verdict["bytes_exact"] < verdict["bytes_sent"] < 0.35 * verdict["bytes_exact"], (
        verdict
    )


@pytest.mark.parametrize("mode", FREE)
def test_out_of_lockstep_all_have_exactly_what_servers_have_where_an_epoch_ends(mode: str) -> None:
    def body(run: Run) -> Tensor:
        model, optimizer, loader = prepared(run)
        for _ in run.epochs(2):
            epoch(model, optimizer, loader)
            client(run).converge()
            found = parameters(model)
            client(run).link.read_all_units({})
            assert torch.equal(found, parameters(model))
        return found

    one, other = workers(2, body, strategy=served(COARSE, **FREE[mode]))
    assert torch.equal(one, other)


def test_the_summary_says_whether_it_paid(tmp_path: Path) -> None:
    workers(2, train, strategy=served(FINE), folder=tmp_path)
    summary = json.loads((tmp_path / "test" / "summary.json").read_text())
    (verdict,) = summary["codecs"]
    whole = 2 * 4 * parameters(net()).numel()  # of two workers
    assert verdict["codec"] == "error_feedback(int8())" and verdict["turns"] == 20
    assert abs(verdict["bytes_exact"] / whole - 1) < 0.01 and verdict["bytes_sent"] < 0.35 * whole
    assert (
        0 < verdict["relative_error"] < 0.05
        and "what servers got of a gradient was" in verdict["words"]
    )
    assert verdict["coding_seconds"] > 0 and verdict["exact_shown_seconds"] > 0


def steps(
    run: Run, until: int, folder: Path, *, resumes: bool = False, saves: int = 0
) -> list[Tensor]:
    model, optimizer, loader = prepared(run)
    if resumes:
        assert run.resume(folder / "test")
    found = []
    for _ in run.epochs(4):
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(parameters(model))
            if run.steps + 1 == saves:
                run.save()
            if run.steps + 1 == until:
                return found
    raise AssertionError("too few batches")


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "codec",
    [
        after(7, COARSE, before=FINE),
        pytest.param(int8(64, "stochastic"), marks=pytest.mark.slow),
        COARSE,
    ],
    ids=repr,
)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(codec: Any, tmp_path: Path) -> None:
    straight = workers(
        2,
        lambda run: steps(run, 9, tmp_path, saves=6),
        strategy=served(codec),
        folder=tmp_path / "straight",
    )
    first = workers(
        2, lambda run: steps(run, 6, tmp_path, saves=6), strategy=served(codec), folder=tmp_path
    )
    later = workers(2, lambda run: steps(run, 9, tmp_path, resumes=True), strategy=served(codec))
    for rank in range(2):
        pieced = [*first[rank], *later[rank]]
        assert len(pieced) == 9
        assert all(
            torch.equal(one, other) for one, other in zip(pieced, straight[rank], strict=True)
        )


def test_with_other_workers_and_servers_nothing_that_was_kept_is_lost(tmp_path: Path) -> None:
    def kept(run: Run) -> Tensor:
        return torch.cat(
            [
                r.reshape(-1)
                for r in client(run).link.codec.get_residuals(client(run).link.slots)
                if r is not None
            ]
        ).double()

    def first(run: Run) -> Tensor:
        steps(run, 6, tmp_path, saves=6)
        return kept(run)

    def later(run: Run) -> Tensor:
        prepared(run)
        assert run.resume(tmp_path / "test")
        return kept(run)

    old = torch.stack(workers(3, first, strategy=served(COARSE), folder=tmp_path)).sum(0)
    assert float(old.norm()) > 0
    new = workers(2, later, strategy=served(COARSE, servers=3))
    torch.testing.assert_close(torch.stack(new).sum(0), old, rtol=1e-5, atol=1e-7)
    said: list[str] = []
    workers(2, lambda run: steps(run, 8, tmp_path, resumes=True), strategy=served(FINE), said=said)
    text = (
        "the checkpoint was written with codec=error_feedback(topk(0.1)), this is "
        "codec=error_feedback(int8()): its residuals are dropped"
    )
    assert any(text in one for one in said)


def test_replicas_are_looked_at_as_servers_have_them() -> None:
    """An evaluation in the middle of an epoch; then they go on, equal."""

    def body(run: Run) -> list[Tensor]:
        model, optimizer, loader = prepared(run)
        held = run.prepare(batches(dtype=torch.float32), train=False)
        found = []
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in held:
                pass
            values = torch.cat([rest.reshape(-1).double() for rest in exactly(run)])
            found.append(parameters(model))
            assert torch.equal(parameters(model), values)
        return found

    def exactly(run: Run) -> list[Tensor]:
        sync, found = (
            client(run),
            [torch.empty_like(slot.parameter) for slot in client(run).link.slots],
        )
        slots = [
            slot._replace(parameter=tensor)
            for slot, tensor in zip(sync.link.slots, found, strict=True)
        ]
        for unit in sync.link.layout.units:
            unit.unpack_parameters(
                slots,
                call_server(
                    sync.link.primaries[unit.server], PullUnit(unit.number, 0, copy=False), 20
                ).values,
            )
        return found

    one, other = workers(2, body, strategy=served(COARSE))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


class TestNotInLockstep:
    """Pushes are coded, parameters come as they are."""

    @pytest.mark.parametrize("staleness", [math.inf, 2])
    def test_what_was_applied_and_what_is_kept_is_all_that_was_given(
        self, staleness: float
    ) -> None:
        def body(run: Run) -> tuple[Tensor, Tensor, Tensor]:
            model, optimizer, loader = prepared(
                run, 0.125, 0.0, model=lambda: net(torch.float64), dtype=torch.float64
            )
            before, given = (
                parameters(model),
                torch.zeros(parameters(model).numel(), dtype=torch.float64),
            )
            for x, y in loader:
                (F.mse_loss(model(x), y) * 0.02).backward()
                given += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                optimizer.step()
                optimizer.zero_grad()
            kept = client(run).link.codec.get_residuals(client(run).link.slots)
            left = torch.cat([r.reshape(-1) for r in kept if r is not None]).double()
            assert float(left.norm()) > 0
            return given, left, before - parameters(model)

        found = workers(2, body, strategy=served(COARSE, staleness=staleness))
        assert torch.equal(found[0][2], found[1][2])
        given, left = sum(one[0] for one in found), sum(one[1] for one in found)
        # the part by which it is weighed, here or by the server
        left /= 1.0 if staleness == math.inf else 0.5
        assert float((found[0][2] / 0.125 / 0.5 + left - given).norm()) < 1e-6 * float(given.norm())

    def test_backup_workers(self) -> None:
        def body(run: Run) -> Tensor:
            model, optimizer, loader = prepared(run)
            for _ in run.epochs(2):
                epoch(model, optimizer, loader)
            return parameters(model)

        found = workers(3, body, strategy=served(FINE, backup_workers=1))
        assert (
            torch.equal(found[0], found[1])
            and torch.equal(found[0], found[2])
            and bool(found[0].isfinite().all())
        )
        before = parameters(net())
        assert float((found[0] - before).norm()) > 0.05

    def test_what_came_too_late_leaves_the_residual_as_it_was(self) -> None:
        def body(run: Run) -> None:
            model, optimizer, loader = prepared(run)
            wrapper, sync = client(run).link.codec, client(run)
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            sync.commit()
            before = {key: x.clone() for key, x in wrapper._committed_residuals.items()}
            for end in (
                lambda: wrapper.end_pushes(sync.link.layout.units, stepped=False),
                wrapper.discard_residuals,
            ):
                for unit in sync.link.layout.units:
                    wrapper.encode_unit(unit, bytes([1] * len(unit.members)), counts=True)
                assert wrapper._pending_residuals
                end()
                wrapper.commit_residuals()
                assert before and all(
                    torch.equal(wrapper._committed_residuals[key], x) for key, x in before.items()
                )

        workers(2, body, strategy=served(COARSE))


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "options", [{}, {"staleness": 2}, {"staleness": math.inf}, {"backup_workers": 1}], ids=str
)
def test_what_is_drawn_is_drawn_anew_in_each_turn(options: Any) -> None:
    """Of 140 parameters a turn takes a fifth: all turns of an epoch together come to nearly all."""

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.Linear(14, 3, bias=False))

    def body(run: Run) -> int:
        torch.manual_seed(0)
        model = small()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.05), batches(160)
        )
        before = parameters(model)
        for x, y in loader:
            F.mse_loss(model(x.float())[:, :2], y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return int((parameters(model) != before).sum())

    strategy = ParameterServer(servers=1, codec=error_feedback(randomk(0.2)), **options)
    assert min(workers(2, body, strategy=strategy)) > 100
