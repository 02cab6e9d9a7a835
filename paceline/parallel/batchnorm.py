"""BatchNorm over the global batch: statistics and gradients are summed over all workers.

    worker 0  x ─ n, Σx, Σx² ─┐                ┌─ y    backward: s·Σg, s·Σg(x-μ) ─┐            ┌─ dx
    worker 1  x ─ n, Σx, Σx² ─┼─ sum ─ μ, σ² ──┼─ y              s·Σg, s·Σg(x-μ) ─┼─ sum, / s ─┼─ dx
    ghost       (zeros)      ─┘                └─ y                (zeros)       ─┘            └─ 0

The layer's own `forward` still runs, so that momentum, counters and the rule for eval mode stay
those of torch or of the user's class. Only `torch.nn.functional.batch_norm` inside it is replaced.
One exchange of 2C+1 numbers in forward, one of 2C numbers in backward, for C channels.
After Ioffe & Szegedy, "Batch Normalization" (2015).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from paceline.comm.group_protocol import Group
from paceline.errors import UsageError

# Private to torch: the base of BatchNorm1d to 3d, and the base of all layers with running
# statistics (InstanceNorm as well). torch has no public name for them; a rename raises ImportError.
BatchNorm: Final = _BatchNorm
NormWithBuffers: Final = _NormBase
# Set on the function that replaces a layer's forward.
_MARK = "_paceline_batchnorm"


def synchronise_batchnorm(
    model: nn.Module,
    group: Group,
    *,
    ghost: Callable[[], bool],
    scale: Callable[[], float],
    copies: Callable[[], bool] = lambda: True,
) -> int:
    """Compute the statistics of every BatchNorm layer of `model` over the batches of all workers.

    Layers stay the same objects, with the same class, `state_dict` and hooks. Their running
    statistics are bit-equal on all workers. An unpickled layer is a plain one. If the function is
    called again, layers use the new group. With a group of one worker, layers are torch's own.

    Forward in training mode and its backward are collective: every worker must run them, in the
    same order. So is forward in eval mode if the layer tracks no statistics. Eval mode with running
    statistics never exchanges anything. Under torch.compile a layer is a graph break.

    Args:
        model: Model whose BatchNorm layers are changed in place.
        group: Workers whose batches together are the global batch.
        ghost: Says whether this worker's batch is no part of the global batch. A ghost adds nothing
            in forward and backward, and gets zero gradients. Called in each forward.
        scale: Factor of this worker's gradients in the sum over the workers: its share of the
            loss's weight for a mean, 1 for a sum. A layer couples samples of different workers, so
            gradients that cross over must be weighted here. Called in each forward.
        copies: Says whether deepcopies of the layers exchange as well, under names of their own, as
            long as the original layer is synchronised. Default: they do.

    Returns:
        Number of BatchNorm layers.

    Raises:
        UsageError: The `forward` of a layer is already replaced on the instance. The layer's
            forward raises it for a class that doesn't call `F.batch_norm`, for one value per
            channel in the whole batch, for a share of weight 0 that has samples, and for
            `create_graph=True`.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    for name, layer in layers:
        current = layer.__dict__.get("forward")
        if current is not None and not _is_replaceable(layer, current):
            raise UsageError(
                f"layer {name!r} ({type(layer).__name__}) has a forward of its own on the "
                "instance, which synchronous BatchNorm would "
                'drop; remove it, or say batchnorm="local"'
            )
    desynchronise_batchnorm(model)
    if group.size > 1:
        for name, layer in layers:
            answer = partial(_GlobalBatchNorm, group=group, ghost=ghost, scale=scale)
            stand_in = _make_forward(layer, f"batchnorm {name}", answer, copies)
            layer.forward = types.MethodType(stand_in, layer)  # type: ignore[method-assign]
    return len(layers)


def desynchronise_batchnorm(model: nn.Module) -> int:
    """Give every synchronised layer its class's forward again; return the number of such layers."""
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and "forward" in module.__dict__
    ]
    changed = [layer for layer in layers if _is_replaceable(layer, layer.__dict__["forward"])]
    for layer in changed:
        del layer.__dict__["forward"]
    return len(changed)


def is_synchronised(module: nn.Module) -> bool:
    """Whether a layer is synchronised, so that its running statistics are right on a ghost, too."""
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), _MARK)


def _is_replaceable(layer: nn.Module, forward: Any) -> bool:
    # An unpickled synchronised layer has its class's forward as a bound method on the instance. It
    # may be replaced, as nothing is lost with it.
    function = getattr(forward, "__func__", None)
    return hasattr(function, _MARK) or function is type(layer).forward


def _make_forward(
    original: _BatchNorm,
    name: str,
    answer: Callable[[str], _GlobalBatchNorm],
    copies: Callable[[], bool],
) -> Callable[..., Tensor]:
    original_ref = weakref.ref(original)

    # A plain function, bound to its layer as a method: deepcopy binds it to the copy, and pickle
    # stores a method as its name ("forward").
    @wraps(_BatchNorm.forward)
    def forward(layer: _BatchNorm, *args: Any, **kwargs: Any) -> Tensor:
        # torch's SyncBatchNorm would exchange by itself, unweighted, and refuses CPU tensors.
        own = (
            _BatchNorm.forward
            if type(layer).forward is nn.SyncBatchNorm.forward
            else type(layer).forward
        )
        name_here = name
        if layer is not (source := original_ref()):
            # This is a deepcopy. It exchanges if its original does, and if it uses batch
            # statistics.
            uses_batch = layer.training or layer.running_mean is None
            if source is None or not is_synchronised(source) or not uses_batch or not copies():
                return own(layer, *args, **kwargs)
            # Workers compare this name: all of them run the copy, or none.
            name_here = f"{name} of a copy"
        mode = answer(name_here)
        with mode:
            y = own(layer, *args, **kwargs)
        if not mode.was_called:
            raise UsageError(
                f"{name}: {type(layer).__name__}.forward doesn't compute by "
                "torch.nn.functional.batch_norm, so its statistics can't be "
                'taken over all workers; call that function in it, or say batchnorm="local"'
            )
        return y

    disable: Callable[..., Any] = torch.compiler.disable
    function: Callable[..., Tensor] = disable(forward)
    setattr(function, _MARK, True)
    return function


class _GlobalBatchNorm(TorchFunctionMode):
    """Computes `F.batch_norm` with statistics of the global batch, not of the local one."""

    def __init__(
        self, name: str, group: Group, ghost: Callable[[], bool], scale: Callable[[], float]
    ) -> None:
        super().__init__()
        self.name, self.group, self.ghost, self.scale = name, group, ghost, scale
        self.was_called = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        self.was_called = True
        return (
            self._normalise_globally(*args, **kwargs)
            if kwargs["training"]
            else F.batch_norm(*args, **kwargs)
        )

    def _normalise_globally(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, **options: Any
    ) -> Tensor:
        scale = None if self.ghost() else float(self.scale())
        # Its samples would change other workers' outputs, but a gradient times 0 can't say how.
        if scale == 0.0 and len(x) > 0 and torch.is_grad_enabled():
            raise UsageError(
                f"{self.name}: this worker's share has {len(x)} samples but weight 0, so what its "
                "samples do to the statistics has no "
                "gradient; give these samples a weight, leave them out of the data, or say "
                'batchnorm="local"'
            )
        statistics = _Statistics(self.name, self.group, x, scale=scale, eps=options["eps"])
        if running_mean is not None and running_var is not None:
            statistics.update_running(running_mean, running_var, options["momentum"])
        y: Tensor = _Normalise.apply(x, options["weight"], options["bias"], statistics)  # type: ignore[no-untyped-call]
        return y


class _Statistics:
    """Mean and biased variance per channel of the global batch, in at least float32.

    `count` stays a tensor, so that no kernel has to be waited for on CUDA. `scale` is None on a
    ghost.
    """

    def __init__(
        self, name: str, group: Group, x: Tensor, *, scale: float | None, eps: float
    ) -> None:
        self.name, self.group, self.eps = name, group, eps
        self.dims = [0, *range(2, x.dim())]
        self.shape = [1, -1, *[1] * (x.dim() - 2)]
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.has_samples = scale is not None and x.numel() > 0
        self.scale = scale or 0.0
        with torch.no_grad():
            self.count, self.mean, self.var = self._sum_over_workers(x)

    def _sum_over_workers(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        channels, count = x.shape[1], 0
        packed = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if self.has_samples:
            count = x.numel() // channels
            x = x.detach().to(self.dtype)
            mean = x.mean(self.dims)
            # Squares are taken around the local mean, as Σx² - nμ² would lose digits in float32.
            # The sums of all workers are put together in float64.
            squares = (x - mean.view(self.shape)).square_().sum(self.dims)
            wide = mean.double()
            packed[:channels] = wide * count
            packed[channels:-1] = wide.square().mul_(count).add_(squares)
            packed[-1] = count
        packed = self.group.all_reduce(packed, op="sum", name=self.name, out=packed).wait()
        # A worker with more than one value needn't look at the sum, which would wait for the
        # device. If the sum is less than 2, every worker has at most one value, and so all of them
        # raise.
        if count <= 1 and packed[-1] < 2:
            raise UsageError(
                f"Expected more than 1 value per channel when training, got {int(packed[-1])} in "
                f"the whole global batch ({self.name}); use larger batches, or drop_last=True"
            )
        mean = packed[:channels] / packed[-1]
        var = (packed[channels:-1] / packed[-1]).sub_(mean.square()).clamp_(min=0)
        return packed[-1], mean.to(self.dtype), var.to(self.dtype)

    def update_running(self, running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
        """Update running statistics; their variance is the unbiased one of the global batch."""
        with torch.no_grad():
            unbiased = self.var * (self.count / (self.count - 1)).to(self.dtype)
            running_mean.copy_(running_mean.to(self.dtype) * (1 - momentum) + self.mean * momentum)
            running_var.copy_(running_var.to(self.dtype) * (1 - momentum) + unbiased * momentum)


class _Normalise(torch.autograd.Function):
    """The function y = w (x - μ) / sqrt(σ² + ε) + b, differentiated through all workers' μ and σ².

    Gradients g of worker r are those of its own loss, and the sum over the workers counts them s_r
    times. So s_r g is exchanged:
        dx = w / σ · (g - (Σ s g + (x-μ) / σ² · Σ s g (x-μ)) / (n s_r))
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: _Statistics
    ) -> Tensor:
        stats = ctx.statistics = statistics
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        if x.numel() == 0:
            return torch.empty_like(x)
        w = None if weight is None else weight.to(stats.dtype)
        b = None if bias is None else bias.to(stats.dtype)
        return torch.batch_norm(
            x, w, b, stats.mean, stats.var, False, 0.0, stats.eps, torch.backends.cudnn.enabled
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = grads, ctx.saved_tensors
        stats: _Statistics = ctx.statistics
        if torch.is_grad_enabled():
            raise UsageError(
                f"{stats.name}: create_graph=True through synchronous BatchNorm is not supported "
                "(its backward can't be differentiated "
                'again); use another normalisation in this model, or say batchnorm="local"'
            )
        inverse = torch.rsqrt(stats.var + stats.eps)
        packed = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
        if stats.has_samples:
            g, centred = g.to(stats.dtype), x.to(stats.dtype) - stats.mean.view(stats.shape)
            packed[0], packed[1] = g.sum(stats.dims), (g * centred).sum(stats.dims)
        # Gradients of weight and bias stay local: they are summed with those of all other
        # parameters.
        dw = (
            (packed[1].to(stats.dtype) * inverse).to(weight.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        db = packed[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None
        total = packed * stats.scale
        total = stats.group.all_reduce(
            total, op="sum", name=f"{stats.name} backward", out=total
        ).wait()
        if not stats.has_samples:
            return torch.zeros_like(x), dw, db, None
        total = (total / (stats.count * stats.scale)).to(stats.dtype)
        g = (g - total[0].view(stats.shape)).addcmul_(
            centred, (total[1] * inverse.square()).view(stats.shape), value=-1
        )
        factor = inverse if weight is None else inverse * weight.to(stats.dtype)
        return g.mul_(factor.view(stats.shape)).to(x.dtype), dw, db, None
