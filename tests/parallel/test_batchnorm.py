"""BatchNorm over several workers against one process on the whole batch: outputs, gradients,
running statistics.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.parallel.batchnorm import (
    desynchronise_batchnorm,
    is_synchronised,
    synchronise_batchnorm,
)
from tests.harness.compiling import COMPILES
from tests.harness.thread_groups import spawn

torch.set_num_threads(1)
Maker = Callable[[], nn.Module]


def batch(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.5, 3, shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    return (torch.randn(*shape, generator=generator) * scale + 2 * scale).to(dtype)


def prepared(layer: nn.Module, seed: int = 5) -> nn.Module:
    """`layer` with parameters that are not ones and zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 1)
    return layer


def objective(y: Tensor, aim: Tensor) -> Tensor:
    """A mean over samples whose gradient differs from value to value."""
    return (
        ((y.float() if y.dtype.itemsize < 4 else y) * aim).tanh().square().flatten(1).sum(1).mean()
    )


def alone(make: Maker, xs: Sequence[Tensor], aims: Sequence[Tensor]) -> tuple[Any, ...]:
    model, outputs, slopes = make(), [], []
    for x, aim in zip(xs, aims, strict=True):
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = model(x)
        objective(y, aim).backward()
        outputs.append(y.detach())
        slopes.append(x.grad)
    return outputs, slopes, [p.grad for p in model.parameters()], model.state_dict()


def together(
    make: Maker, xs: Sequence[Tensor], aims: Sequence[Tensor], shares: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Each worker's rows; ghosts get the first row full of nan, and gradients are weighed as the
    session does.
    """
    starts = [sum(shares[:r]) for r in range(len(shares))]

    def body(group: Group) -> tuple[Any, ...]:
        model, mine = make(), slice(starts[group.rank], starts[group.rank] + shares[group.rank])
        ghost, scale = shares[group.rank] == 0, shares[group.rank] / sum(shares)
        synchronise_batchnorm(model, group, ghost=lambda: ghost, scale=lambda: scale)
        outputs, slopes = [], []
        for x, aim in zip(xs, aims, strict=True):
            x, aim = (
                (torch.full_like(x[:1], float("nan")), aim[:1]) if ghost else (x[mine], aim[mine])
            )
            x = x.clone(memory_format=torch.preserve_format).requires_grad_()
            y = model(x)
            objective(y, aim).backward()
            assert x.grad is not None
            if ghost:
                assert not x.grad.any()
            else:
                outputs.append(y.detach())
                slopes.append(x.grad * scale)
        grads = [
            p.grad if ghost else p.grad * scale for p in model.parameters() if p.grad is not None
        ]
        return outputs, slopes, grads, model.state_dict()

    return spawn(len(shares), body)


def compare(
    make: Maker,
    shape: Sequence[int],
    shares: Sequence[int],
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-10,
    **how: Any,
):
    xs = [batch(shape, dtype, seed).contiguous(**how) for seed in (1, 2, 3)]
    aims = [batch(shape, torch.float64, seed + 10) / 4 for seed in (1, 2, 3)]
    outputs, slopes, grads, state = alone(make, xs, aims)
    results = together(make, xs, aims, shares)
    close = {"rtol": tolerance, "atol": tolerance}
    for turn in range(len(xs)):
        torch.testing.assert_close(
            torch.cat([r[0][turn] for r in results if r[0]]), outputs[turn], **close
        )
        torch.testing.assert_close(
            torch.cat([r[1][turn] for r in results if r[1]]), slopes[turn], **close
        )
    for i, grad in enumerate(grads):
        torch.testing.assert_close(sum(r[2][i] for r in results), grad, **close)
    for key, value in state.items():
        torch.testing.assert_close(results[0][3][key], value, **close)
        assert all(torch.equal(r[3][key], results[0][3][key]) for r in results), key


LAYERS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "1d with length": (lambda: nn.BatchNorm1d(3), (8, 3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (8, 3, 2, 2, 2)),
    "sync": (lambda: nn.SyncBatchNorm(3), (8, 3, 4, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 2)),
    "momentum and eps": (lambda: nn.BatchNorm2d(3, momentum=0.7, eps=0.5), (8, 3, 4, 2)),
    "untracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 2)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 2)),
    "without bias": (lambda: nn.BatchNorm2d(3, bias=False), (8, 3, 4, 2)),
    "untracked in eval mode": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
        (8, 3, 4, 2),
    ),
    "eval mode": (lambda: nn.BatchNorm2d(3).eval(), (8, 3, 4, 2)),
}


SHARES = [(4, 4), (1, 7), (3, 3, 2), (0, 8), (5, 0, 3)]
# in eval mode a ghost's gradients are the session's to replace
CASES = [
    (kind, shares) for kind in LAYERS for shares in SHARES if kind != "eval mode" or 0 not in shares
]


@pytest.mark.parametrize(("kind", "shares"), CASES, ids=str)
def test_equals_one_process(kind: str, shares: tuple[int, ...]) -> None:
    make, shape = LAYERS[kind]
    compare(lambda: prepared(make()).double(), shape, shares)


@pytest.mark.parametrize("shares", [(6, 2), (0, 5, 3)], ids=str)
def test_deep_model_with_several_layers(shares: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        convolutions = [
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3),
            nn.BatchNorm2d(5),
            nn.Flatten(),
        ]
        return nn.Sequential(*convolutions, nn.Linear(20, 3), nn.BatchNorm1d(3)).double()

    state = make().state_dict()

    def same() -> nn.Module:  # threads share torch's generator
        model = make()
        model.load_state_dict(state)
        return model

    xs = [batch((8, 3, 6, 6), seed=seed) for seed in (1, 2)]
    aims = [batch((8, 3), seed=seed + 10) / 4 for seed in (1, 2)]
    outputs, slopes, grads, buffers = alone(same, xs, aims)
    results = together(same, xs, aims, shares)
    torch.testing.assert_close(
        torch.cat([r[0][1] for r in results if r[0]]), outputs[1], rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        torch.cat([r[1][1] for r in results if r[1]]), slopes[1], rtol=1e-9, atol=1e-10
    )
    for i, grad in enumerate(grads):
        torch.testing.assert_close(
            sum(r[2][i].nan_to_num() for r in results), grad, rtol=1e-9, atol=1e-10
        )
    for key, value in buffers.items():
        torch.testing.assert_close(results[-1][3][key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float32: 2e-5}[dtype]
    compare(lambda: prepared(nn.BatchNorm2d(3)), (8, 3, 16, 16), (5, 3), dtype, tolerance)


def test_parameters_in_bfloat16() -> None:
    compare(
        lambda: prepared(nn.BatchNorm2d(3)).bfloat16(), (8, 3, 4, 4), (5, 3), torch.bfloat16, 6e-2
    )


def test_float32_statistics_far_from_zero() -> None:
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + 1000

    def body(group: Group) -> Tensor:
        layer = nn.BatchNorm1d(2, momentum=1.0)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        layer(x.chunk(2)[group.rank])
        return layer.running_var

    torch.testing.assert_close(spawn(2, body)[0].double(), x.double().var(0), rtol=1e-4, atol=0)


def test_channels_last_is_kept() -> None:
    compare(
        lambda: prepared(nn.BatchNorm2d(3)).double(),
        (8, 3, 4, 2),
        (5, 3),
        memory_format=torch.channels_last,
    )

    def body(group: Group) -> tuple[bool, bool]:
        layer = nn.BatchNorm2d(3)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        x = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        return y.is_contiguous(memory_format=torch.channels_last), x.grad.is_contiguous(
            memory_format=torch.channels_last
        )

    assert spawn(2, body) == [(True, True)] * 2


def test_losses_that_are_sums_have_scale_one() -> None:
    x, aim = batch((8, 3)), batch((8, 3), seed=9)
    layer = prepared(nn.BatchNorm1d(3)).double()
    whole = x.clone().requires_grad_()
    (layer(whole) * aim).tanh().sum().backward()

    def body(group: Group) -> Tensor:
        mine = slice(0, 6) if group.rank == 0 else slice(6, 8)
        layer = prepared(nn.BatchNorm1d(3)).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 1.0)
        part = x[mine].clone().requires_grad_()
        (layer(part) * aim[mine]).tanh().sum().backward()
        assert part.grad is not None
        return part.grad

    torch.testing.assert_close(torch.cat(spawn(2, body)), whole.grad, rtol=1e-10, atol=1e-10)


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    def body(group: Group) -> tuple[bool, bool]:
        layer = nn.BatchNorm1d(3).requires_grad_(False)
        layer.bias.requires_grad_(True)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        layer(batch((4, 3), torch.float32, group.rank)).square().sum().backward()
        with torch.no_grad():
            layer(batch((4, 3), torch.float32, group.rank))
        return layer.weight.grad is None, layer.bias.grad is not None

    assert spawn(2, body) == [(True, True)] * 2


def test_workers_that_come_late_change_nothing() -> None:
    x = batch((8, 3))
    expected = nn.BatchNorm1d(3).double()(x)

    def body(group: Group) -> Tensor:
        layer = nn.BatchNorm1d(3).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.25)
        for turn in range(10):
            time.sleep(0.001 * ((group.rank * 7 + turn * 3) % 4))
            y = layer(x.chunk(4)[group.rank])
        return y

    torch.testing.assert_close(torch.cat(spawn(4, body)), expected, rtol=1e-10, atol=1e-10)


def test_one_value_in_the_whole_batch_raises_as_torch_does() -> None:
    def body(group: Group) -> str:
        layer = nn.BatchNorm1d(3)
        synchronise_batchnorm(layer, group, ghost=lambda: group.rank > 0, scale=lambda: 1.0)
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel when training, got 1"
        ):
            layer(torch.randn(1, 3))
        return "raised"

    assert spawn(3, body) == ["raised"] * 3


def test_one_sample_on_each_worker_is_a_batch() -> None:
    compare(lambda: nn.BatchNorm1d(3).double(), (3, 3), (1, 1, 1))


def test_empty_share_instead_of_a_ghost() -> None:
    x = batch((4, 3))
    expected = nn.BatchNorm1d(3).double()
    expected(x)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        layer = nn.BatchNorm1d(3).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 1.0 - group.rank)
        part = (x if group.rank == 0 else x[:0]).clone().requires_grad_()
        y = layer(part)
        y.sum().backward()
        return y, layer.running_var

    (_, first), (empty, second) = spawn(2, body)
    assert empty.shape == (0, 3)
    torch.testing.assert_close(first, expected.running_var)
    assert torch.equal(first, second)


def test_weight_zero_with_samples_raises() -> None:
    def body(group: Group) -> None:
        layer = nn.BatchNorm1d(3)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.0)
        with pytest.raises(UsageError, match="weight 0"):
            layer(torch.randn(4, 3))

    spawn(2, body)


def test_create_graph_raises() -> None:
    def body(group: Group) -> None:
        layer = nn.BatchNorm1d(3)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        x = torch.randn(4, 3, requires_grad=True)
        with pytest.raises(UsageError, match="create_graph=True"):
            torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)

    spawn(2, body)


def test_checkpointing_recomputes_with_the_same_statistics() -> None:
    from torch.utils.checkpoint import checkpoint

    x = batch((8, 3))

    def body(group: Group, reentrant: bool | None) -> Tensor:
        layer = prepared(nn.BatchNorm1d(3)).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        part = x.chunk(2)[group.rank].clone().requires_grad_()
        y = (
            layer(part)
            if reentrant is None
            else checkpoint(layer, part, use_reentrant=reentrant, preserve_rng_state=False)
        )
        y.tanh().square().sum().backward()
        assert part.grad is not None
        return part.grad

    plain = spawn(2, lambda group: body(group, None))
    for reentrant in (True, False):
        for a, b in zip(
            plain, spawn(2, lambda group, reentrant=reentrant: body(group, reentrant)), strict=True
        ):
            torch.testing.assert_close(a, b)


class Activated(nn.BatchNorm2d):
    """A user's layer: BatchNorm with the activation inside."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Handmade(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


def test_a_subclass_keeps_what_its_forward_does() -> None:
    compare(lambda: Activated(3).double(), (8, 3, 4, 2), (5, 3))


def test_a_class_that_does_not_compute_by_batch_norm_raises() -> None:
    def body(group: Group) -> None:
        layer = Handmade(3)
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        with pytest.raises(UsageError, match="Handmade"):
            layer(torch.randn(4, 3))

    spawn(2, body)


def test_a_forward_replaced_on_the_instance_raises() -> None:
    def body(group: Group) -> None:
        model = nn.Sequential(nn.BatchNorm1d(3))
        model[0].forward = lambda x: x
        with pytest.raises(UsageError, match="'0'"):
            synchronise_batchnorm(model, group, ghost=lambda: False, scale=lambda: 0.5)

    spawn(2, body)


def test_layers_stay_the_users_own() -> None:
    def body(group: Group) -> None:
        model = nn.Sequential(
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
            nn.Sequential(nn.BatchNorm1d(3)),
            nn.InstanceNorm1d(3),
        )
        layer, keys = model[1], list(model.state_dict())
        heard: list[str] = []
        layer.register_forward_hook(lambda *_: heard.append("hook"))
        assert synchronise_batchnorm(model, group, ghost=lambda: False, scale=lambda: 0.5) == 2
        # again: a new group, not a second wrapping
        assert synchronise_batchnorm(model, group, ghost=lambda: False, scale=lambda: 0.5) == 2
        assert (
            model[1] is layer and type(layer) is nn.BatchNorm1d and list(model.state_dict()) == keys
        )
        assert is_synchronised(layer) and not is_synchronised(model[0])
        layer(torch.randn(2, 3))
        assert heard == ["hook"]
        assert desynchronise_batchnorm(model) == 2 and desynchronise_batchnorm(model) == 0
        assert "forward" not in layer.__dict__ and not is_synchronised(layer)
        layer(torch.randn(2 + group.rank, 3))  # local again

    spawn(2, body)


def test_group_of_one_leaves_the_layers_alone() -> None:
    def body(group: Group) -> None:
        layer = nn.BatchNorm1d(3)
        assert synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 1.0) == 1
        assert "forward" not in layer.__dict__
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            layer(torch.randn(1, 3))

    spawn(1, body)


def test_a_deepcopy_exchanges_where_it_is_asked_to() -> None:
    x = batch((8, 3))
    expected = nn.BatchNorm1d(3).double()
    expected(x)

    def body(group: Group) -> nn.Module:
        layer, asked = nn.BatchNorm1d(3).double(), [False]
        synchronise_batchnorm(
            layer, group, ghost=lambda: False, scale=lambda: 0.5, copies=lambda: asked[0]
        )
        if group.rank == 0:  # alone: nobody else would come to an exchange
            torch.testing.assert_close(copy.deepcopy(layer)(x), nn.BatchNorm1d(3).double()(x))
            torch.testing.assert_close(
                copy.deepcopy(layer).eval()(x), nn.BatchNorm1d(3).double().eval()(x)
            )
        asked[0] = True
        twin = copy.deepcopy(layer)
        assert twin.forward.__self__ is twin
        twin(x.chunk(2)[group.rank])
        assert not layer.running_mean.any()
        return twin

    for twin in spawn(2, body):
        torch.testing.assert_close(twin.running_var, expected.running_var)


def test_a_deepcopy_is_plain_once_its_original_is() -> None:
    x = batch((8, 3))

    def body(group: Group) -> None:
        layer = nn.BatchNorm1d(3).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 0.5)
        twin = copy.deepcopy(layer)
        desynchronise_batchnorm(layer)
        if group.rank == 0:
            torch.testing.assert_close(twin(x), nn.BatchNorm1d(3).double()(x))

    spawn(2, body)


def test_an_unpickled_model_is_plain_and_can_be_synchronised_again() -> None:
    def body(group: Group) -> None:
        model = nn.Sequential(nn.BatchNorm1d(3))
        synchronise_batchnorm(model, group, ghost=lambda: False, scale=lambda: 0.5)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert type(twin[0]) is nn.BatchNorm1d and not is_synchronised(twin[0])
        assert twin[0].forward.__self__ is twin[0]
        twin(torch.randn(3 + group.rank, 3))
        assert synchronise_batchnorm(twin, group, ghost=lambda: False, scale=lambda: 0.5) == 1
        assert is_synchronised(twin[0])

    spawn(2, body)


def test_lazy_layers() -> None:
    def body(group: Group) -> Tensor:
        model = nn.Sequential(nn.LazyBatchNorm1d(dtype=torch.float64))
        synchronise_batchnorm(model, group, ghost=lambda: False, scale=lambda: 0.5)
        y = model(batch((8, 3)).chunk(2)[group.rank])
        assert type(model[0]) is nn.BatchNorm1d
        return y

    torch.testing.assert_close(
        torch.cat(spawn(2, body)), nn.BatchNorm1d(3).double()(batch((8, 3))), rtol=1e-10, atol=1e-10
    )


@COMPILES
@pytest.mark.slow
def test_under_compile_it_is_a_graph_break_and_right() -> None:
    x = batch((8, 3))
    expected = prepared(nn.BatchNorm1d(3)).double()
    whole = x.clone().requires_grad_()
    expected(whole * 2).tanh().sum().backward()

    def body(group: Group) -> Tensor:
        layer = prepared(nn.BatchNorm1d(3)).double()
        synchronise_batchnorm(layer, group, ghost=lambda: False, scale=lambda: 1.0)
        inside = nn.Sequential(nn.Hardtanh(-99, 99), layer, nn.Tanh())
        model = torch.compile(inside, backend="eager") if group.rank == 0 else inside
        part = x.chunk(2)[group.rank].clone().requires_grad_()
        model(part * 2).sum().backward()
        assert part.grad is not None
        return part.grad

    torch.testing.assert_close(torch.cat(spawn(2, body)), whole.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_with_a_group_that_answers_for_the_others() -> None:
    class Twice:
        """Two workers with the same batch, played by one."""

        rank, size = 0, 2

        def all_reduce(self, x: Tensor, *, op: str, name: str, out: Tensor) -> Any:
            from paceline.comm.group_protocol import FinishedWork

            return FinishedWork(out.copy_(x * 2))

    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float16, 4e-3)):
        plain, layer = (
            prepared(nn.BatchNorm2d(3))
            .cuda()
            .to(torch.float64 if dtype == torch.float64 else torch.float32)
            for _ in range(2)
        )
        synchronise_batchnorm(layer, Twice(), ghost=lambda: False, scale=lambda: 0.5)  # type: ignore[arg-type]
        x = batch((8, 3, 4, 2), dtype).cuda()
        a, b = torch.cat([x, x]).requires_grad_(), x.clone().requires_grad_()
        y, z = plain(a), layer(b)
        torch.testing.assert_close(y[:8], z, rtol=tolerance, atol=tolerance)
        y.tanh().square().sum().backward()
        z.tanh().square().sum().backward()
        torch.testing.assert_close(a.grad[:8], b.grad, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(plain.running_var, layer.running_var, rtol=1e-5, atol=1e-6)
