"""BatchNorm over the whole global batch: the user's own layers, with statistics and gradients
summed over all workers.

    worker 0   x ─ n, Σx, Σx² ─┐                   ┌─ y     backward:  s·Σg, s·Σg(x-μ) ─┐
                                                            ┌─ dx
    worker 1   x ─ n, Σx, Σx² ─┼─ sum ─ μ, σ² ─────┼─ y                s·Σg, s·Σg(x-μ) ─┼─ sum, / s
               ─┼─ dx
    ghost        (zeros)      ─┘                   └─ y                  (zeros)       ─┘
                                                   └─ 0

The layer's own `forward` still runs (momentum, counters, the rule for eval mode stay torch's or the
user's class's); only `torch.nn.functional.batch_norm` inside it is answered here. One exchange of
2C+1 numbers forward, one of 2C backward. After Ioffe & Szegedy, "Batch Normalization" (2015).
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from paceline.comm.group import Group
from paceline.errors import UsageError

_MARK = "_paceline_batchnorm"  # set on the function that stands in for a layer's forward


def synchronise(
    model: nn.Module,
    group: Group,
    *,
    ghost: Callable[[], bool],
    scale: Callable[[], float],
    copies: Callable[[], bool] = lambda: True,
) -> int:
    """Let every BatchNorm layer of `model` take its statistics from the batches of all workers of
    `group`; return the number of layers.

    `ghost()`: this worker's batch is not part of the global one: it adds nothing forward, nothing
    backward, and gets zero gradients. `scale()`: what this worker's gradients will be multiplied by
    when they are summed over the workers (its share of the loss's weight for a mean, 1 for a sum);
    layers couple samples of different workers, so gradients that cross over must be weighed here.
    Both are asked at each forward. `copies()`: whether deepcopies of the layers exchange, too, by
    names of their own.

    Layers stay the objects they are, with the same class, `state_dict` and hooks; their running
    statistics come out bit-equal on all workers. A deepcopy does as `copies` says, as long as its
    original is synchronised; an unpickled layer is plain. Called again, it takes the new group;
    with a group of one the layers are torch's own.

    Raises UsageError for a layer whose `forward` was already replaced on the instance, and in
    `forward` for a class that doesn't compute by `F.batch_norm`, for one value per channel in the
    whole batch, and for a share of weight 0 that has samples.

    The trap: forward in training mode (in eval mode too, when the layer tracks no statistics) and
    its backward are collective: every worker must run them, in the same order. Eval mode with
    running statistics never exchanges anything. Under torch.compile a layer is a graph break.
    `create_graph=True` through a layer raises.
    """
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    ]
    for name, layer in layers:
        current = layer.__dict__.get("forward")
        if current is not None and not _replaceable(layer, current):
            raise UsageError(
                f"layer {name!r} ({type(layer).__name__}) has a forward of its own on the "
                "instance, which synchronous BatchNorm would "
                'drop; remove it, or say batchnorm="local"'
            )
    desynchronise(model)
    if group.size > 1:
        for name, layer in layers:
            answer = partial(_GlobalBatchNorm, group=group, ghost=ghost, scale=scale)
            stand_in = _stand_in(layer, f"batchnorm {name}", answer, copies)
            layer.forward = types.MethodType(stand_in, layer)  # type: ignore[method-assign]
    return len(layers)


def desynchronise(model: nn.Module) -> int:
    """Give every synchronised layer its class's own forward back; return the number of layers
    changed.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and "forward" in module.__dict__
    ]
    changed = [layer for layer in layers if _replaceable(layer, layer.__dict__["forward"])]
    for layer in changed:
        del layer.__dict__["forward"]
    return len(changed)


def is_synchronous(module: nn.Module) -> bool:
    """Whether a layer is synchronised: its running statistics are right on a ghost too and must
    not be restored.
    """
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), _MARK)


def _replaceable(layer: nn.Module, forward: Any) -> bool:
    # An unpickled synchronised layer holds its class's forward as a bound method: nothing is lost
    # with it.
    function = getattr(forward, "__func__", None)
    return hasattr(function, _MARK) or function is type(layer).forward


def _stand_in(
    original: _BatchNorm,
    name: str,
    answer: Callable[[str], _GlobalBatchNorm],
    copies: Callable[[], bool],
) -> Callable[..., Tensor]:
    whose = weakref.ref(original)

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
        called = name
        if layer is not (owner := whose()):
            takes = layer.training or layer.running_mean is None  # statistics of this batch
            if owner is None or not is_synchronous(owner) or not takes or not copies():
                return own(layer, *args, **kwargs)
            called = f"{name} of a copy"  # this name is compared: all workers run the copy, or none
        mode = answer(called)
        with mode:
            y = own(layer, *args, **kwargs)
        if not mode.asked:
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
    """Answers `F.batch_norm` with statistics of the whole global batch where it would take them
    from the local one.
    """

    def __init__(
        self, name: str, group: Group, ghost: Callable[[], bool], scale: Callable[[], float]
    ) -> None:
        super().__init__()
        self.name, self.group, self.ghost, self.scale = name, group, ghost, scale
        self.asked = False

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
        self.asked = True
        return (
            self._normalise(*args, **kwargs)
            if kwargs["training"]
            else F.batch_norm(*args, **kwargs)
        )

    def _normalise(
        self, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, **options: Any
    ) -> Tensor:
        scale = None if self.ghost() else float(self.scale())
        if scale == 0.0 and len(x) > 0 and torch.is_grad_enabled():
            raise UsageError(
                f"{self.name}: this worker's share has {len(x)} samples but weight 0, so what its "
                "samples do to the statistics has no "
                "gradient; give these samples a weight, leave them out of the data, or say "
                'batchnorm="local"'
            )
        statistics = _Statistics(self.name, self.group, x, scale=scale, eps=options["eps"])
        if running_mean is not None and running_var is not None:
            statistics.track(running_mean, running_var, options["momentum"])
        y: Tensor = _Normalise.apply(x, options["weight"], options["bias"], statistics)  # type: ignore[no-untyped-call]
        return y


class _Statistics:
    """Mean and biased variance per channel of the whole global batch, in at least float32.

    `count` stays a tensor, so that CUDA isn't waited for. `scale` is None on a ghost.
    """

    def __init__(
        self, name: str, group: Group, x: Tensor, *, scale: float | None, eps: float
    ) -> None:
        self.name, self.group, self.eps = name, group, eps
        self.dims = [0, *range(2, x.dim())]
        self.shape = [1, -1, *[1] * (x.dim() - 2)]
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.present = scale is not None and x.numel() > 0
        self.scale = scale or 0.0
        with torch.no_grad():
            self.count, self.mean, self.var = self._sum_up(x)

    def _sum_up(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        channels, mine = x.shape[1], 0
        packed = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if self.present:
            mine = x.numel() // channels
            x = x.detach().to(self.dtype)
            mean = x.mean(self.dims)
            # around the local mean: no cancellation in float32
            squares = (x - mean.view(self.shape)).square_().sum(self.dims)
            wide = mean.double()
            packed[:channels] = wide * mine
            packed[channels:-1] = wide.square().mul_(mine).add_(squares)
            packed[-1] = mine
        packed = self.group.all_reduce(packed, op="sum", name=self.name, out=packed).wait()
        # then it is so on every worker, and no other has to look (and wait for the device)
        if mine <= 1 and packed[-1] < 2:
            raise UsageError(
                f"Expected more than 1 value per channel when training, got {int(packed[-1])} in "
                f"the whole global batch ({self.name}); "
                "use larger batches, or drop_last=True"
            )
        mean = packed[:channels] / packed[-1]
        var = (packed[channels:-1] / packed[-1]).sub_(mean.square()).clamp_(min=0)
        return packed[-1], mean.to(self.dtype), var.to(self.dtype)

    def track(self, running_mean: Tensor, running_var: Tensor, momentum: float) -> None:
        """Move the running statistics; the variance is the unbiased one of the whole global
        batch.
        """
        with torch.no_grad():
            unbiased = self.var * (self.count / (self.count - 1)).to(self.dtype)
            running_mean.copy_(running_mean.to(self.dtype) * (1 - momentum) + self.mean * momentum)
            running_var.copy_(running_var.to(self.dtype) * (1 - momentum) + unbiased * momentum)


class _Normalise(torch.autograd.Function):
    """The function y = w (x - μ) / sqrt(σ² + ε) + b, with a backward that goes through μ and σ² of
    all workers.

    Gradients g of worker r are those of its own loss; the sum over the workers counts them s_r
    times. So s_r g is exchanged:
        dx = w / σ · (g - (Σ s g + (x-μ) / σ² · Σ s g (x-μ)) / (n s_r))
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: _Statistics
    ) -> Tensor:
        at = ctx.statistics = statistics
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        if x.numel() == 0:
            return torch.empty_like(x)
        w = None if weight is None else weight.to(at.dtype)
        b = None if bias is None else bias.to(at.dtype)
        return torch.batch_norm(
            x, w, b, at.mean, at.var, False, 0.0, at.eps, torch.backends.cudnn.enabled
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight) = grads, ctx.saved_tensors
        at: _Statistics = ctx.statistics
        if torch.is_grad_enabled():
            raise UsageError(
                f"{at.name}: create_graph=True through synchronous BatchNorm is not supported (its "
                "backward can't be differentiated "
                'again); use another normalisation in this model, or say batchnorm="local"'
            )
        inverse = torch.rsqrt(at.var + at.eps)
        packed = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
        if at.present:
            g, centred = g.to(at.dtype), x.to(at.dtype) - at.mean.view(at.shape)
            packed[0], packed[1] = g.sum(at.dims), (g * centred).sum(at.dims)
        dw = (
            (packed[1].to(at.dtype) * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        db = packed[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, dw, db, None
        total = packed * at.scale
        total = at.group.all_reduce(total, op="sum", name=f"{at.name} backward", out=total).wait()
        if not at.present:
            return torch.zeros_like(x), dw, db, None
        total = (total / (at.count * at.scale)).to(at.dtype)
        g = (g - total[0].view(at.shape)).addcmul_(
            centred, (total[1] * inverse.square()).view(at.shape), value=-1
        )
        factor = inverse if weight is None else inverse * weight.to(at.dtype)
        return g.mul_(factor.view(at.shape)).to(x.dtype), dw, db, None
