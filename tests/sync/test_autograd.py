"""What p.grad is after backward, and what a step does, for everything a script may do: as on one
worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.elastic.rollback import Rollback
from paceline.elastic.transaction import RecoverableTransaction
from paceline.errors import PacelineError, ReplicasDiffer, UsageError
from paceline.session.run import Run
from paceline.state.versioned import GeneratorStates
from paceline.sync.allreduce import AllReduce
from tests.harness.compiling import COMPILES
from tests.harness.jobs import PATIENCE
from tests.harness.runs import alone, batches, cut, distance, parameters, workers

CUTS = [None, cut(1, 7), cut(0, 8)]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights wherever it is made (threads share torch's generator, so
    they are filled by hand).
    """
    model = build().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


Body = Callable[[Run, Any], Tensor]


def same(
    body: Body,
    *,
    size: int = 2,
    cuts: list[Any] = CUTS,
    bound: float = 1e-12,
    bucket_mb: float = 0.0001,
) -> None:
    """`body` ends with the same numbers on one worker and on each of several, for equal and
    unequal shares.
    """
    wanted = alone(lambda run: body(run, None))
    assert torch.isfinite(wanted).all()
    for shares in cuts:
        for found in workers(
            size,
            lambda run, shares=shares: body(run, shares),
            strategy=AllReduce(bucket_mb=bucket_mb),
        ):
            assert distance(found, wanted) < bound


def loop(
    step: Callable[[Run, nn.Module, torch.optim.Optimizer, Tensor, Tensor], Any],
    build: Callable[[], nn.Module] = net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9
    ),
    **options: Any,
) -> Body:
    """A training loop of two epochs, of three batches each, around `step`."""

    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(build)
        opt = optimizer(model.parameters())
        model, opt, loader = run.prepare(model, opt, batches(24), shares=shares, **options)
        for _ in run.epochs(2):
            for x, y in loader:
                step(run, model, opt, x, y)
        return parameters(model)

    return body


def plain(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()


@pytest.mark.parametrize("bucket_mb", [0.0001, 8.0])
def test_a_plain_loop(bucket_mb: float) -> None:
    same(loop(plain), bucket_mb=bucket_mb)


def test_clipping() -> None:
    norms: dict[tuple[int, int], list[float]] = {}

    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = run.clip(model, 0.1)
        assert norm is not None
        norms.setdefault((run.size, run.rank), []).append(float(norm))
        opt.step()

    same(loop(step), cuts=[None])
    assert max(norms[1, 0]) > 0.1
    assert norms[2, 0] == norms[2, 1] == pytest.approx(norms[1, 0], rel=1e-9)


def test_torchs_own_clipping_after_backward() -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()

    same(loop(step))


def test_gradscaler_with_an_inf_step() -> None:
    scales = []

    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        model, opt, loader, scaler = run.prepare(model, opt, batches(), scaler, shares=shares)
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(loader):
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                if number == 2 and run.rank == run.size - 1:  # one worker alone overflows
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
        scales.append(scaler.get_scale())
        return parameters(model)

    same(body, cuts=[None, cut(1, 7)])
    assert len(set(scales)) == 1


@pytest.mark.each_choice
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_accumulation_by_hand(quiet: bool, to_none: bool) -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model, opt, loader = run.prepare(model, opt, batches(), shares=shares)
        for _ in run.epochs(2):
            for number, (x, y) in enumerate(loader):
                if quiet and number % 2 == 0:
                    with run.no_sync():
                        (F.mse_loss(model(x), y) / 2).backward()
                else:
                    (F.mse_loss(model(x), y) / 2).backward()
                if number % 2:
                    opt.step()
                    opt.zero_grad(set_to_none=to_none)
        return parameters(model)

    same(body)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_both_ways_and_none_at_all(to_none: bool) -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        opt.step()
        if run.steps % 3 == 2:  # otherwise gradients add up over steps
            opt.zero_grad(set_to_none=to_none)

    same(loop(step))


def test_what_p_grad_held_is_kept_apart() -> None:
    """A gradient that differs between workers, set by hand, is not averaged: what backward adds
    is.
    """

    def body(run: Run) -> tuple[Tensor, Tensor]:
        model = seeded(lambda: nn.Linear(6, 2))
        model, loader = run.prepare(model, batches())
        x, y = next(iter(loader))
        for p in model.parameters():
            p.grad = torch.full_like(p, float(run.rank + 1))
        F.mse_loss(model(x), y).backward()
        return model.weight.grad.clone(), model.bias.grad.clone()

    wanted = alone(body)
    for rank, found in enumerate(workers(2, body)):
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a - (rank + 1), b - 1)


def test_frozen_parameters_and_parameter_groups() -> None:
    def build() -> nn.Module:
        model = net()
        for p in model[0].parameters():
            p.requires_grad_(False)
        return model

    def optimizer(ps: Any) -> torch.optim.Optimizer:
        ps = list(ps)
        return torch.optim.SGD(
            [
                {"params": ps[2:4], "lr": 0.3},
                {"params": ps[4:], "weight_decay": 0.1},
                {"params": ps[:2]},
            ],
            lr=0.1,
        )

    same(loop(plain, build, optimizer))


def test_parameters_unfrozen_after_prepare() -> None:
    def build() -> nn.Module:
        model = net()
        for p in model[0].parameters():
            p.requires_grad_(False)
        return model

    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        if run.steps == 3:
            for p in model.parameters():
                p.requires_grad_(True)
        plain(run, model, opt, x, y)

    same(loop(step, build))


class Twice(nn.Module):
    """A layer used twice, and weights tied between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.into.weight
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.tied(torch.tanh(self.into(torch.tanh(self.into(x)))))))


def test_a_parameter_used_twice_and_tied_weights() -> None:
    same(loop(plain, Twice))


class Branches(nn.Module):
    """`often` is taken by samples with a positive first feature only, `never` by none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.often, self.never = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        chosen = x[:, 0] > 1.0
        if chosen.any():
            y = y + torch.where(chosen[:, None], self.often(x), torch.zeros_like(y))
        if x.shape[0] > 1000:
            y = y + self.never(x)
        return y


def test_branches_that_some_or_no_workers_take() -> None:
    """AdamW decays what has a gradient of zeros, and leaves alone what has none."""
    for size in (2, 3):
        same(
            loop(plain, Branches, lambda ps: torch.optim.AdamW(ps, lr=0.05, weight_decay=0.5)),
            size=size,
            cuts=[None],
            bound=1e-9,
        )


def test_unused_everywhere_keeps_p_grad() -> None:
    def body(run: Run) -> None:
        model = seeded(Branches)
        model.never.weight.grad = torch.full_like(model.never.weight, 5.0)
        model, loader = run.prepare(model, batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            assert model.never.bias.grad is None and bool((model.never.weight.grad == 5).all())

    workers(2, body)


def test_a_worker_without_any_gradient_joins_at_step() -> None:
    def body(run: Run) -> Tensor:
        model = seeded(net)
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
        )
        for number, (x, y) in enumerate(loader):
            opt.zero_grad()
            out = model(x)
            if number % 2 and run.rank == 1:
                # its loss is zero and reaches no parameter
                out = torch.zeros_like(out, requires_grad=True) * 1.0 + y
            loss = F.mse_loss(out, y)
            loss.backward()
            opt.step()
        return parameters(model)

    first, second = workers(2, body)
    assert torch.equal(first, second)


def test_a_worker_that_skips_backward_and_step_altogether_joins_at_the_next_batch() -> None:
    def body(run: Run) -> list[Tensor]:
        model = seeded(net)
        model, loader = run.prepare(model, batches())
        grads = []
        for number, (x, y) in enumerate(loader):
            model.zero_grad()
            if number % 2 and run.rank == 1:
                continue
            F.mse_loss(model(x), y).backward()
            grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
        return grads

    both, one = workers(2, body)
    assert all(torch.isfinite(g).all() for g in both) and len(one) < len(both)


def test_two_losses_with_retain_graph() -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        out = model(x)
        F.mse_loss(out, y).backward(retain_graph=True)
        F.l1_loss(out, y).backward()
        opt.step()

    same(loop(step))


def test_a_gan_with_two_optimizers_and_a_gradient_penalty() -> None:
    """WGAN-GP: the discriminator's gradients from the generator's loss pile up and are cleared;
    the penalty goes through autograd.grad.
    """

    def body(run: Run, shares: Any) -> Tensor:
        make = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
        judge = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)))
        for_make = torch.optim.Adam(make.parameters(), lr=0.01)
        for_judge = torch.optim.Adam(judge.parameters(), lr=0.01)
        make, for_make, judge, for_judge, loader = run.prepare(
            make, for_make, judge, for_judge, batches(), shares=shares
        )
        for _ in run.epochs(2):
            for number, (x, _) in enumerate(loader):
                noise = x.flip(1) * 0.5
                for_judge.zero_grad()
                fake = make(noise)
                mixed = (0.3 * x + 0.7 * fake.detach()).requires_grad_(True)
                [slope] = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
                loss = (
                    judge(fake.detach()).mean()
                    - judge(x).mean()
                    + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
                )
                loss.backward()
                for_judge.step()
                if number % 2:
                    for_make.zero_grad()
                    (-judge(make(noise)).mean()).backward()
                    for_make.step()
        return parameters(make, judge)

    same(body, bound=1e-9)


class Checkpointed(nn.Module):
    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.where, self.reentrant = (
            nn.Linear(6, 6),
            nn.Linear(6, 2),
            where,
            reentrant,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.where in ("first", "both"):
            # threads that ask for the state of torch's one generator at once may lock each other
            # out for ever
            x = checkpoint(
                lambda z: torch.tanh(self.first(z)),
                x.requires_grad_(),
                use_reentrant=self.reentrant,
                preserve_rng_state=False,
            )
        else:
            x = torch.tanh(self.first(x))
        return (
            checkpoint(self.last, x, use_reentrant=self.reentrant, preserve_rng_state=False)
            if self.where in ("last", "both")
            else self.last(x)
        )


@pytest.mark.each_choice
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["first", "last", "both"])
def test_checkpointing(where: str, reentrant: bool) -> None:
    same(loop(plain, lambda: Checkpointed(where, reentrant)))


def test_reentrant_checkpoints_that_share_a_layer() -> None:
    """Its gradient comes twice in one backward, the second time after its bucket has left."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = checkpoint(
                    lambda z: torch.tanh(self.layer(z)),
                    x.requires_grad_(),
                    use_reentrant=True,
                    preserve_rng_state=False,
                )
            return self.out(x)

    same(loop(plain, Shared))


def test_backward_called_on_a_submodule_alone() -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        hidden = checkpoint(
            model[0], x.requires_grad_(), use_reentrant=True, preserve_rng_state=False
        )
        hidden.pow(2).mean().backward()
        assert model[0].weight.grad is not None
        opt.step()

    same(loop(step))


def test_create_graph_that_reaches_parameters_raises() -> None:
    def body(run: Run) -> None:
        model, loader = run.prepare(seeded(net), batches())
        x, y = next(iter(loader))
        with pytest.raises(UsageError, match="create_graph"):
            F.mse_loss(model(x), y).backward(create_graph=True)
        raise UsageError("as expected")

    with pytest.raises(PacelineError):
        workers(2, body)


def test_autograd_grad_is_local() -> None:
    def body(run: Run) -> Tensor:
        model, loader = run.prepare(seeded(net), batches())
        x, y = next(iter(loader))
        grads = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        assert all(p.grad is None for p in model.parameters())
        return torch.cat([g.reshape(-1) for g in grads])

    first, second = workers(2, body)
    assert not torch.equal(first, second)


def test_what_hooks_of_a_parameter_see() -> None:
    """The gradient of the worker's own share, a mean over its samples; after prepare the later
    kind of hook sees nothing.
    """

    def body(run: Run) -> None:
        model = seeded(net)
        seen: list[Tensor | None] = []
        parameter = next(model.parameters())

        def twice(grad: Tensor) -> Tensor:
            seen.append(grad.clone())
            return grad * 2

        def look(p: Tensor) -> None:
            seen.append(None if p.grad is None else p.grad.clone())

        parameter.register_post_accumulate_grad_hook(look)
        model, loader = run.prepare(model, batches(), shares=cut(6, 2, 0))
        parameter.register_hook(twice)
        parameter.register_post_accumulate_grad_hook(look)
        x, y = next(iter(loader))
        alike = seeded(net)
        (mine,) = torch.autograd.grad(F.mse_loss(alike(x), y), [next(alike.parameters())])
        F.mse_loss(model(x), y).backward()
        first, before, after = seen
        assert first is not None and before is not None and after is None
        torch.testing.assert_close(first, mine)
        torch.testing.assert_close(before, 2 * mine)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 2 * run.mean(mine))

    workers(3, body)


@COMPILES
@pytest.mark.filterwarnings("ignore")
def test_compiled_models() -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled, opt, loader = run.prepare(
            torch.compile(model, backend="eager"), opt, batches(), shares=shares
        )
        for _ in run.epochs(1):
            for x, y in loader:
                plain(run, compiled, opt, x, y)
        return parameters(model)

    same(body, cuts=[None])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            torch.relu(
                self.conv(x.view(-1, 1, 2, 3).contiguous(memory_format=torch.channels_last))
            ).flatten(1)
        )


def test_channels_last_keeps_the_strides_of_the_parameters() -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        plain(run, model, opt, x, y)
        assert model.conv.weight.grad.stride() == model.conv.weight.stride()

    same(loop(step, lambda: Images().to(memory_format=torch.channels_last)))


def test_mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.short = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def double(self) -> nn.Module:
            self.wide.double(), self.narrow.float(), self.short.bfloat16()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.short(
                torch.tanh(self.narrow(torch.tanh(self.wide(x)).float())).bfloat16()
            ).double()

    same(loop(plain, Mixed), bound=2e-2)


@pytest.mark.parametrize("kind", ["embedding", "bag", "both"])
def test_sparse_embedding_gradients(kind: str) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = (
                nn.Embedding(50, 3, sparse=True)
                if kind != "bag"
                else nn.EmbeddingBag(50, 3, sparse=True, mode="sum")
            )
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            words = (x.abs() * 10).long().clamp(max=49)
            if kind == "bag":
                return self.out(self.table(words))
            y = self.table(words).sum(1)
            if kind == "both":  # a dense gradient for the same table
                y = y + F.embedding(words[:, :2], self.table.weight, sparse=False).sum(1)
            return self.out(y)

    def optimizer(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=0.1)

    same(loop(plain, Words, optimizer))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_foreach_and_fused_optimizers(options: dict[str, bool]) -> None:
    same(loop(plain, net, lambda ps: torch.optim.AdamW(ps, lr=0.01, **options)), bound=1e-9)


def test_closures() -> None:
    def step(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)

    same(loop(step))


def test_lbfgs_raises() -> None:
    with pytest.raises(UsageError, match="LBFGS"):
        alone(lambda run: run.prepare(torch.optim.LBFGS(net().parameters())))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.filterwarnings("error:Detected call of")
@pytest.mark.filterwarnings("error:Seems like")
def test_schedulers_made_before_and_after_prepare(before: bool) -> None:
    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        model, opt, loader = run.prepare(model, opt, batches(), shares=shares)
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        scheduler = run.prepare(scheduler)
        for x, y in loader:
            plain(run, model, opt, x, y)
            scheduler.step()
        assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
        return parameters(model)

    same(body)


def test_a_deepcopy_of_the_optimizer_steps_itself() -> None:
    def body(run: Run) -> None:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model, opt, loader = run.prepare(model, opt, batches())
        x, y = next(iter(loader))
        F.mse_loss(model(x), y).backward()
        twin = copy.deepcopy(opt)
        for p, q in zip(twin.param_groups[0]["params"], model.parameters(), strict=True):
            p.grad = q.grad.clone()  # torch doesn't copy them
        before = parameters(model)
        twin.step()
        assert torch.equal(parameters(model), before)
        assert isinstance(opt, torch.optim.SGD) and not torch.equal(
            twin.param_groups[0]["params"][0], opt.param_groups[0]["params"][0]
        )
        opt.step()
        assert torch.equal(twin.param_groups[0]["params"][0], opt.param_groups[0]["params"][0])

    workers(2, body)


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model\.module"):
        alone(lambda run: run.prepare(nn.DataParallel(net())))


def test_a_backward_that_fails_half_way_is_named() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("half way")

    def body(run: Run) -> None:
        model = seeded(net)
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), batches()
        )
        x, y = next(iter(loader))
        with pytest.raises(ValueError, match="half way"):
            F.mse_loss(model[2:](Fails.apply(model[:2](x))), y).backward()
        with pytest.raises(UsageError, match="was caught"):
            opt.step()
        raise UsageError("as expected")

    with pytest.raises(UsageError):
        workers(2, body)


def test_a_mutant_that_does_not_communicate_or_ignores_weights_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.comm.solo import SoloGroup
    from paceline.sync import routes

    with monkeypatch.context() as patch:
        patch.setattr(
            routes.GroupReducer,
            "all_reduce",
            lambda self, flat, name, **_: SoloGroup().all_reduce(flat.mul_(2), out=flat),
        )
        with pytest.raises((AssertionError, ReplicasDiffer)):
            same(loop(plain), cuts=[None])
    from paceline.sync.autograd import GradientTracker

    begin = GradientTracker._begin_pass

    def unweighted(self: GradientTracker) -> None:
        begin(self)
        self._scale = 0.5

    monkeypatch.setattr(GradientTracker, "_begin_pass", unweighted)
    same(loop(plain), cuts=[None])
    with pytest.raises(AssertionError):
        same(loop(plain), cuts=[cut(1, 7)])


@pytest.mark.parametrize("used", ["everywhere", "on some"])
def test_gradients_in_memory_of_the_script_stay_there(used: str) -> None:
    """One tensor of all gradients, which the script reads and steps by."""

    def body(run: Run, shares: Any) -> Tensor:
        model = seeded(net)
        model, loader = run.prepare(model, batches(), shares=shares)
        sizes = [p.numel() for p in model.parameters()]
        flat = torch.zeros(sum(sizes), dtype=torch.float64)
        for p, part in zip(model.parameters(), flat.split(sizes), strict=True):
            p.grad = part.view_as(p)
        for number, (x, y) in enumerate(loader):
            flat.zero_()
            if number % 2 or used == "everywhere" or run.rank == 0:
                F.mse_loss(model(x), y).backward()
            run._loop.exchange_due_gradients("the test")
            if used == "everywhere":
                F.l1_loss(model(x), y).backward()
            with torch.no_grad():
                for p, part in zip(model.parameters(), flat.split(sizes), strict=True):
                    assert p.grad is not None and p.grad.data_ptr() == part.data_ptr()
                    p.sub_(part.view_as(p), alpha=0.1)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    if used == "everywhere":
        same(body)
    else:
        first, second = workers(2, lambda run: body(run, None))
        assert torch.equal(first, second)


class Lost(Exception):
    """How a worker dies here."""


@pytest.mark.parametrize(
    "where", ["forward", "the first gradient", "optimizer.step", "the next turn"]
)
def test_a_pass_in_which_a_worker_was_lost_ends_with_zeros(where: str) -> None:
    """Where losses are survived: p.grad has zeros, nothing raises, and it is told."""

    def body(run: Run) -> Any:
        model = seeded(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model, opt, loader = run.prepare(model, opt, batches())

        def recover(error: PacelineError) -> None:
            run._context.step_state.exchange_closed = True  # as the living agree

        rollback = Rollback(dict, [model], GeneratorStates(run.device), run._backward)
        run._prepared.epochs.recover_by(
            RecoverableTransaction(run._loop.turns, run._backward, rollback, run._prepared.tables),
            lambda loader: 0,
        )
        run._agreement.recovery = recover
        # or workers would meet in a step that happens to come a second later
        run._collector._meetings.next_step = 100
        turns = iter(loader)
        last = run.rank == 2
        for number in range(3):
            x, y = next(turns)
            dies = last and number == 2
            if dies and where == "forward":
                raise Lost
            if dies and where == "the first gradient":
                next(iter(model.parameters())).register_hook(
                    lambda _: (_ for _ in ()).throw(Lost())
                )
            loss = F.mse_loss(model(x), y)
            try:
                loss.backward()
            except Lost:
                raise Lost from None
            if number == 2 and where in ("forward", "the first gradient"):
                assert run._loop.transaction.failed
                assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
                F.mse_loss(model(x), y).backward()  # a second pass of the turn is dropped too
                assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
                return "failed"
            assert not run._loop.transaction.failed
            if dies and where == "optimizer.step":
                raise Lost
            opt.step()
            opt.zero_grad()
        return "through"

    found: list[Any] = []

    def noted(run: Run) -> Any:
        found.append(body(run))
        raise Lost

    with pytest.raises((Lost, PacelineError)):
        workers(3, noted, deadline=PATIENCE)
    assert found.count("failed" if where in ("forward", "the first gradient") else "through") >= 2
