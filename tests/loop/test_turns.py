"""What a turn of a loader is: its weight, its ghost, and which turns are steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.errors import Mismatch, PacelineError, UsageError
from paceline.loop.observers import LoopObservers
from paceline.session.run import Run
from paceline.trace import DESTINATIONS, MEASURED_CAUSES, STEP_PARTS
from tests.harness.runs import Numbered, alone, batches, cut, distance, parameters, workers


def net(width: int = 6) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ready(run: Run, *loaders: Any, **options: Any) -> Any:
    model = net()
    return run.prepare(model, sgd(model), *(loaders or (batches(),)), **options)


def advance(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def same(
    body: Callable[[Run, Any], Tensor],
    ways: list[tuple[int, Any]] | None = None,
    bound: float = 1e-12,
) -> None:
    """`body(run, shares)` ends alike on one worker and on several."""
    wanted = alone(lambda run: body(run, None))
    assert torch.isfinite(wanted).all()
    for size, shares in ways or [(2, None), (2, [1, 7]), (2, [0, 8]), (3, [3, 3, 2])]:
        for found in workers(size, lambda run, shares=shares: body(run, shares)):
            assert distance(found, wanted) < bound


# ---- the moment


def test_scale_and_weight_of_each_turn() -> None:
    def body(run: Run) -> list[tuple[float, float, bool, bool]]:
        step_state = run._context.step_state
        assert (step_state.scale, step_state.ghost, step_state.defer_exchange) == (
            1 / run.size,
            False,
            False,
        )
        _, _, loader = ready(run, batches(18, 8), shares=[1, 7])
        seen = [
            (step_state.scale, run.weight, step_state.ghost, step_state.defer_exchange)
            for _ in loader
        ]
        assert (step_state.scale, step_state.ghost, run._loop.turn) == (
            1 / run.size,
            False,
            None,
        ) and run.weight == 1.0
        return seen

    first, second = workers(2, body)
    assert first == [(1 / 8, 1, False, False), (1 / 8, 1, False, False), (0.0, 0, True, False)]
    assert second == [(7 / 8, 7, False, False), (7 / 8, 7, False, False), (1.0, 2, False, False)]


# ---- ghosts


class Counted(nn.Module):
    """Buffers of a user's own: one changed in place, one replaced, one integer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x.sum()
            self.mean = 0.9 * self.mean + x.detach().mean(0)
            self.calls += 1
        out: Tensor = self.net(x)
        return out


def test_a_ghost_has_the_buffers_of_who_has_samples() -> None:
    def body(run: Run) -> tuple[Tensor, Tensor, int]:
        model = Counted()
        model, opt, loader = run.prepare(model, sgd(model), batches(), shares=[0, 8])
        for x, y in loader:
            advance(model, opt, x, y)
        return model.seen.clone(), model.mean.clone(), int(model.calls)

    ghost, worker = workers(2, body)
    assert float(worker[0]) != 0 and worker[1].any() and worker[2] == 5
    assert torch.equal(ghost[0], worker[0]) and torch.equal(ghost[1], worker[1]) and ghost[2] == 5


def test_a_ghost_leaves_local_batchnorm_statistics_as_they_were() -> None:
    def body(run: Run) -> tuple[Tensor, int, float]:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        model, opt, loader = run.prepare(
            model, sgd(model), batches(), shares=[0, 8], batchnorm="local"
        )
        model[1].eval()  # one row has no variance: the ghost must not stop there
        if run.rank:
            model[1].train()
        for x, y in loader:
            advance(model, opt, x, y)
        return (
            model[1].running_mean.clone(),
            int(model[1].num_batches_tracked),
            float(model[0].weight.detach().sum()),
        )

    ghost, worker = workers(2, body)
    assert not ghost[0].any() and ghost[1] == 0
    assert worker[0].any() and worker[1] == 5
    assert ghost[2] == worker[2]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_of_a_ghost_goes_nowhere(where: str) -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        for x, y in loader:
            opt.zero_grad()
            out = model(x)
            if run._loop.turn is not None and run._loop.turn.ghost:
                if where == "loss":
                    out = out * math.nan
                else:
                    out.register_hook(lambda g: g * math.inf)
            loss = F.mse_loss(out, y)
            loss.backward()
            opt.step()
            run.log(loss=loss)
        return parameters(model)

    same(body, [(2, [0, 8]), (3, [0, 0, 1])])


# ---- weights


def tokens(batch: Any) -> float:
    return float((batch[0][:, 0] > 0).sum())


def test_a_mean_over_tokens() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares, weigh=tokens)
        for _ in run.epochs(2):
            for x, y in loader:
                chosen = x[:, 0] > 0
                opt.zero_grad()
                loss = F.mse_loss(model(x), y, reduction="none")[chosen].sum() / chosen.sum().clamp(
                    min=1
                )
                loss.backward()
                opt.step()
        return parameters(model)

    same(body)


def test_all_weights_zero_make_no_update_and_it_is_said_once() -> None:
    class Masked(Numbered):
        def __getitem__(self, index: int) -> Any:
            return self.x[index], self.y[index], float(not 8 <= index < 24)

    def body(run: Run) -> Tensor:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        data = DataLoader(Masked(), batch_size=8)
        model, opt, loader, _ = run.prepare(
            model, opt, data, scheduler, weigh=lambda batch: float(batch[2].sum())
        )
        moved = []
        for x, y, mask in loader:
            before = parameters(model)
            opt.zero_grad()
            # 0 / 0 where all are masked
            loss = (F.mse_loss(model(x), y, reduction="none").mean(1) * mask).sum() / mask.sum()
            loss.backward()
            opt.step()
            scheduler.step()
            moved.append(not torch.equal(before, parameters(model)))
        assert moved == [True, False, False, True, True] and run.steps == 5
        assert scheduler.last_epoch == 3
        return parameters(model)

    for size in (1, 2):
        said: list[str] = []
        found = workers(size, body, said=said)
        assert all(torch.isfinite(one).all() for one in found)
        assert len([text for text in said if "weights of step" in text]) == 1
    assert distance(found[0], alone(body)) < 1e-12


# ---- accumulation


def test_a_step_on_gradients_of_no_sync_exchanges_them() -> None:
    """Otherwise replicas would part without a word."""

    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        for x, y in loader:
            opt.zero_grad()
            with run.no_sync():
                F.mse_loss(model(x), y).backward()
            opt.step()
        return parameters(model)

    same(body)


@pytest.mark.parametrize("order", ["loud first", "silent first", "silent twice"])
def test_two_losses_of_which_some_are_silent(order: str) -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        for x, y in loader:
            opt.zero_grad()
            if order == "loud first":
                F.mse_loss(model(x), y).backward()
            for _ in range(2 if order == "silent twice" else 1):
                with run.no_sync():
                    F.l1_loss(model(x), y).backward()
            if order == "silent first":
                F.mse_loss(model(x), y).backward()
            run.clip(model, 0.7)
            opt.step()
        return parameters(model)

    same(body)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_inside_no_sync_raises(size: int) -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        x, y = next(iter(loader))
        with run.no_sync():
            F.mse_loss(model(x), y).backward()
            opt.step()

    with pytest.raises(UsageError, match="no_sync"):
        workers(size, body)


# ---- which turns are steps


def test_a_gradscaler_that_skips_still_counts_turns() -> None:
    def body(run: Run) -> tuple[int, float]:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, opt, loader, scaler = run.prepare(model, sgd(model), batches(), scaler)
        for number, (x, y) in enumerate(loader):
            opt.zero_grad()
            loss = F.mse_loss(model(x), y) * (math.inf if number < 2 and run.is_first else 1.0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        return run.steps, scaler.get_scale()

    assert workers(2, body) == [(5, 1.0)] * 2


def test_a_gradscaler_where_a_worker_has_no_gradient_at_all() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model, opt, loader, scaler = run.prepare(model, sgd(model), batches(), scaler)
        for number, (x, y) in enumerate(loader):
            opt.zero_grad()
            scaler.scale(torch.zeros(()))
            if number % 2 == 0 or run.rank == 0:
                scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        return parameters(model)

    first, second = workers(2, body)
    assert torch.equal(first, second)


def test_break_ends_the_epoch_for_all() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        for epoch in run.epochs(3):
            for number, (x, y) in enumerate(loader):
                advance(model, opt, x, y)
                if number == epoch:
                    break
            assert loader.epoch == epoch + 1
        assert run.steps == 1 + 2 + 3
        for x, y in loader:
            advance(model, opt, x, y)
        assert run.steps == 11
        return parameters(model)

    same(body)


def test_evaluation_inside_a_turn_changes_nothing() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = net()
        test = DataLoader(Numbered(11), batch_size=4)
        model, opt, loader = run.prepare(model, sgd(model), batches(), shares=shares)
        test = run.prepare(test, train=False, shares=shares)
        for number, (x, y) in enumerate(loader):
            turn = run._loop.turn
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            rows = 0
            with torch.no_grad():
                for n, (u, _) in enumerate(test):
                    assert (
                        run._loop.turn is not turn
                        and run._loop.turn is not None
                        and not run._loop.turn.train
                    )
                    rows += len(run.gather(model(u)))
                    if number % 2 and n == 1:
                        break
            assert run._loop.turn is turn and rows == (8 if number % 2 else 11)
            loss.backward()
            opt.step()
            assert run.steps == number
        assert run.steps == 5
        return parameters(model)

    same(body)


@pytest.mark.parametrize("how", ["train=False", "no_grad"])
def test_evaluation_between_epochs(how: str) -> None:
    """Every sample once, accuracy as on one worker, and no step."""

    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        test = run.prepare(
            DataLoader(Numbered(13), batch_size=4),
            train=False if how == "train=False" else None,
            shares=shares,
        )
        found = []
        for epoch in run.epochs(2):
            for x, y in loader:
                advance(model, opt, x, y)
            with torch.no_grad():
                model.eval()
                found.append(
                    torch.cat(
                        [
                            run.gather(F.mse_loss(model(u), v, reduction="none").mean(1))
                            for u, v in test
                        ]
                    )
                )
                model.train()
            assert run.steps == 5 * (epoch + 1)
        return torch.cat(found)

    same(body)


@pytest.mark.parametrize("how", ["zip", "nested", "forever"])
def test_two_training_loaders(how: str) -> None:
    """The first leads: its turns are the steps."""

    def body(run: Run, shares: Any) -> Tensor:
        model = net()
        other = DataLoader(Numbered(16 if how == "nested" else 48), batch_size=8)
        model, opt, loader, other = run.prepare(model, sgd(model), batches(), other, shares=shares)

        def forever() -> Any:
            while True:
                yield from other

        for epoch in range(2):
            if how == "nested":
                for x, y in loader:
                    for u, v in other:
                        advance(model, opt, u, v)
                    advance(model, opt, x, y)
            else:
                for (x, y), (u, v) in zip(
                    loader, other if how == "zip" else forever(), strict=False
                ):
                    opt.zero_grad()
                    (F.mse_loss(model(x), y) + F.mse_loss(model(u), v)).backward()
                    opt.step()
            assert run.steps == 5 * (epoch + 1)
        return parameters(model)

    same(body)


def test_clipping_joins_where_a_worker_has_no_gradient() -> None:
    def body(run: Run) -> Tensor:
        model, opt, loader = ready(run)
        for number, (x, y) in enumerate(loader):
            opt.zero_grad()
            if run.rank == 0 or number % 2 == 0:
                F.mse_loss(model(x), y).backward()
            assert float(run.clip(model, 0.01) or 0) > 0.01
            opt.step()
        return parameters(model)

    first, second = workers(2, body)
    assert torch.equal(first, second)


def test_a_worker_without_a_gradient_after_an_inner_loop_joins() -> None:
    def body(run: Run) -> Tensor:
        model = net()
        model, opt, loader, other = run.prepare(model, sgd(model), batches(), batches(16, 8))
        for x, y in loader:
            for u, v in other:
                advance(model, opt, u, v)
            opt.zero_grad()
            if run.rank == 0:
                F.mse_loss(model(x), y).backward()
            opt.step()
        return parameters(model)

    first, second = workers(2, body)
    assert torch.equal(first, second)


def test_two_training_loaders_with_different_shares_raise() -> None:
    def body(run: Run) -> None:
        model = net()
        model, loader = run.prepare(model, batches())
        other = run.prepare(DataLoader(Numbered(48), batch_size=8), shares=[1, 7])
        for (x, y), (u, v) in zip(loader, other, strict=False):
            (F.mse_loss(model(x), y) + F.mse_loss(model(u), v)).backward()

    with pytest.raises(UsageError, match="two training loaders"):
        workers(2, body)


def test_one_training_loader_after_another_that_was_broken_off() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = net()
        model, opt, loader, other = run.prepare(
            model, sgd(model), batches(), batches(24, 8), shares=shares
        )
        for number, (x, y) in enumerate(loader):
            advance(model, opt, x, y)
            if number == 1:
                break
        for x, y in other:
            advance(model, opt, x, y)
        assert run.steps == 2 + 3
        return parameters(model)

    same(body)


def test_next_of_iter_in_a_loop() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=shares)
        for _ in range(3):
            x, y = next(iter(loader))
            advance(model, opt, x, y)
        return parameters(model)

    same(body)


def test_a_loop_without_a_loader() -> None:
    """Each worker counts alike; one without a gradient joins at step, in every turn of the loop."""

    def body(run: Run) -> Tensor:
        model = net()
        data = Numbered(24)
        model, opt = run.prepare(model, sgd(model))
        for step in range(4):
            mine = range(step * 6, step * 6 + 6)[run.rank :: run.size]
            x, y = data.x[list(mine)], data.y[list(mine)]
            opt.zero_grad()
            if not (run.rank == 1 and step % 2):
                F.mse_loss(model(x), y).backward()
            run.clip(model, 10.0)
            opt.step()
        return parameters(model)

    first, second = workers(2, body)
    assert torch.equal(first, second)

    def plain(run: Run) -> Tensor:
        model = net()
        data = Numbered(24)
        model, opt = run.prepare(model, sgd(model))
        for step in range(4):
            mine = range(step * 6, step * 6 + 6)[run.rank :: run.size]
            advance(model, opt, data.x[list(mine)], data.y[list(mine)])
        return parameters(model)

    for found in workers(2, plain):
        assert distance(found, alone(plain)) < 1e-12


def test_a_backward_in_an_evaluation_loop_is_weighted_too() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = net()
        model, opt, loader = run.prepare(model, sgd(model), batches(), shares=shares, train=False)
        for x, y in loader:
            advance(model, opt, x, y)
        assert run.steps == 0
        return parameters(model)

    same(body)


def test_unfreezing_on_some_workers_only_raises() -> None:
    def body(run: Run) -> None:
        model = net()
        for p in model[0].parameters():
            p.requires_grad_(False)
        model, opt, loader = run.prepare(model, sgd(model), batches())
        for number, (x, y) in enumerate(loader):
            if number == 2 and run.rank == 1:
                model[0].weight.requires_grad_(True)
            advance(model, opt, x, y)

    with pytest.raises(Mismatch, match=r"0\.weight is trained on rank 1 and frozen on rank 0"):
        workers(2, body)


def test_seconds_of_a_step_add_up() -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        seen: list[dict[str, float]] = []
        run._loop.observe(
            LoopObservers(step_ended=(lambda step, samples, seconds: seen.append(seconds),))
        )
        for x, y in loader:
            advance(model, opt, x, y)
        assert len(seen) == 5 and all(
            set(s) == {*STEP_PARTS, *MEASURED_CAUSES, *DESTINATIONS} and min(s.values()) >= 0
            for s in seen
        )

    workers(2, body)


def test_one_worker_breaking_off_alone_is_named() -> None:
    def body(run: Run) -> None:
        model, opt, loader = ready(run)
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(loader):
                advance(model, opt, x, y)
                if run.rank == 1 and number == 2:
                    break

    with pytest.raises(PacelineError, match="rank 1"):
        workers(2, body)


def test_shares_as_a_function() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model, opt, loader = ready(run, shares=cut(1, 7) if run.size == 2 else None)
        for x, y in loader:
            advance(model, opt, x, y)
        return parameters(model)

    same(body, [(2, None)])
