"""Logits of which each worker has those of some words, and their cross entropy, for which nobody
needs all of them.

    logits = model(x)                                     shape (batch, tokens, words), as ever; in
                                                          memory words / workers
    F.cross_entropy(logits.view(-1, words), y.view(-1))   two exchanges of a few numbers per token
    logits.softmax(-1)                                    anything else gathers them first: right,
                                                          and large

After Shoeybi et al., "Megatron-LM" (2019), section 3. With z the logits of a token, m their maximum
and t its target:

    loss = log(sum exp(z - m)) + m - z[t]                 sums and the maximum are taken over all
                                                          workers
    gradient of z = softmax(z) - (1 at t)                 each worker has all it needs
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.errors import UsageError
from paceline.parallel.tensor.functions import TensorAxis, eager

Function = Callable[..., Any]


class VocabLogits(Tensor):
    """Logits whose last dimension is cut between workers.

    It looks like the whole tensor; what it holds in memory is this worker's part.

    Functions that leave the last dimension alone give another of the kind, `F.cross_entropy` is
    computed on the parts, and all others get the whole tensor, which is a collective call: all
    workers that cut the layer make it.
    """

    tensor_axis: TensorAxis
    words: int
    name_of_layer: str

    @staticmethod
    def of(local: Tensor, axis: TensorAxis, words: int, name: str) -> VocabLogits:
        """Present this worker's part as the whole."""
        found = local.as_subclass(VocabLogits)
        found.__dict__.update(tensor_axis=axis, words=words, name_of_layer=name)
        return found

    def local(self) -> Tensor:
        """Return this worker's part as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def like(self, local: Tensor) -> VocabLogits:
        """Present another part as the whole, of the same layer."""
        return VocabLogits.of(local, self.tensor_axis, self.words, self.name_of_layer)

    def whole(self) -> Tensor:
        """Gather the logits of all words, as a plain tensor. Collective."""
        return self.tensor_axis.join(self.local(), -1, self.name_of_layer)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = HANDLERS.get(func) if args and isinstance(args[0], VocabLogits) else None
        found = NotImplemented if handler is None else handler(func, args[0], args[1:], kwargs)
        if found is not NotImplemented:
            return found
        _refuse_changes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_gathered(args), **_gathered(kwargs))


def _refuse_changes(func: Function, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise for what writes into logits: it would write into a gathered copy."""
    name = getattr(func, "__name__", "")
    written = name in ("__set__", "__setitem__", "retain_grad") or re.fullmatch(
        r"[a-z].*[^_]_|__i(?!nvert|nt|ndex)\w+__", name
    )
    if written and args and isinstance(args[0], VocabLogits):
        raise UsageError(
            f"the logits of {args[0].name_of_layer} are cut by words and can't be changed by "
            f"{name}; change logits.whole()"
        )
    if isinstance(kwargs.get("out"), VocabLogits):
        raise UsageError("logits that are cut by words can't be written to by out=; leave it out")


def _gathered(value: Any) -> Any:
    if isinstance(value, VocabLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(_gathered(item) for item in value)
    if isinstance(value, dict):
        return {name: _gathered(item) for name, item in value.items()}
    return value


# ---- what leaves the words alone


def _shape(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    shape = torch.Size((*x.local().shape[:-1], x.words))
    dim = args[0] if args else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _numel(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> int:
    return math.prod(_shape(func, x, (), {}))


def _on_part(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Do to my part what is done to each element, to all alike."""
    asks_dtype = func in (Tensor.to, Tensor.type_as)  # of another tensor, and nothing else of it
    others = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not asks_dtype
    ]
    # a factor's gradient needs all words
    if any(value.dim() or value.requires_grad for value in others):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        found = func(x.local(), *args, **kwargs)
    return x.like(found)


def _about_part(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Ask my part, or autograd for it, what is the same of the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, *args, **kwargs)


def _text(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> str:
    """Write my part: who prints is often one worker alone, which can't gather."""
    return (
        f"part {x.tensor_axis.rank} of {x.tensor_axis.size} of logits "
        f"{tuple(_shape(func, x, (), {}))}: {x.local()!r}"
    )


def _view(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    wanted = kwargs.get(
        "shape",
        kwargs.get(
            "size",
            args[0] if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args,
        ),
    )
    if isinstance(wanted, torch.dtype) or (len(wanted) and isinstance(wanted[0], torch.dtype)):
        return NotImplemented
    sizes, known = list(wanted), math.prod(size for size in wanted if size != -1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = _numel(func, x, (), {}) // max(known, 1)
    if not sizes or sizes[-1] != x.words or math.prod(sizes) != _numel(func, x, (), {}):
        return NotImplemented
    return x.like(
        x.local().reshape(*sizes[:-1], -1)
        if func is not Tensor.view
        else x.local().view(*sizes[:-1], x.local().shape[-1])
    )


def _flatten(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    start = kwargs.get("start_dim", args[0] if args else 0)
    end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
    if end % x.dim() == x.dim() - 1 and start % x.dim() != x.dim() - 1:
        return NotImplemented
    return x.like(x.local().flatten(start, end))


def _item(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    used = [item for item in index if item is not None and item is not Ellipsis]
    taken = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
        for item in used
    )
    plain = all(
        isinstance(item, int | slice | Tensor) and not isinstance(item, bool) for item in used
    )
    everything = bool(index) and isinstance(index[-1], slice) and index[-1] == slice(None)
    spread = any(item is Ellipsis for item in index)
    kept = (everything if spread and index[-1] is not Ellipsis else taken < x.dim()) or (
        everything and taken == x.dim()
    )
    if not plain or not kept:
        return NotImplemented
    return x.like(x.local()[args[0]])


# ---- the loss


def _cross_entropy(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    names = (
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, reduction = given.get("target"), given.get("reduction", "mean")
    plain = all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
    if (
        not plain
        or reduction not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or isinstance(target, VocabLogits)
    ):
        return NotImplemented
    # else the words are not the last dimension
    if target.is_floating_point() or x.dim() != 2 or target.shape != x.shape[:1]:
        return NotImplemented
    return _loss(
        x,
        target,
        int(given.get("ignore_index", -100)),
        reduction,
        float(given.get("label_smoothing", 0.0)),
    )


@eager
def _loss(x: VocabLogits, target: Tensor, ignored: int, reduction: str, smoothing: float) -> Tensor:
    local = x.local()
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # as autocast does for this function
    counted = target != ignored
    terms = _Terms(x.tensor_axis, x.name_of_layer, x.words, smoothing)
    losses: Tensor = _CrossEntropy.apply(local, target, counted, terms)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _Terms(NamedTuple):
    axis: TensorAxis
    name: str
    words: int
    smoothing: float


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor, counted: Tensor, terms: _Terms) -> Tensor:
        axis, name, words, smoothing = terms
        wrong = counted & ((target < 0) | (target >= words))
        if z.device.type != "cpu":
            torch._assert_async(~wrong.any())
        elif bool(wrong.any()):
            raise UsageError(
                f"{name}: target {int(target[wrong][0])} is out of range; there are {words} words"
            )
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        largest = axis.add_up(wide.amax(-1), f"maximum of {name}", op="max")
        local = target - axis.rank * z.shape[-1]
        mine = counted & (local >= 0) & (local < z.shape[-1])
        local = local.masked_fill(~mine, 0).unsqueeze(-1)
        shifted = wide - largest.unsqueeze(-1)
        hit = shifted.gather(-1, local).squeeze(-1).masked_fill(~mine, 0)
        sums = torch.stack([shifted.exp().sum(-1), hit, *([shifted.sum(-1)] if smoothing else [])])
        sums = axis.add_up(sums, f"sums of {name}", out=sums)
        logarithm = sums[0].log()
        losses = logarithm - sums[1]
        if smoothing:
            losses = losses * (1 - smoothing) + (logarithm - sums[2] / words) * smoothing
        ctx.save_for_backward(z, logarithm + largest, local, mine, counted)
        ctx.exchanged = smoothing, words
        return losses.masked_fill(~counted, 0).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, logarithm, local, mine, counted = ctx.saved_tensors
        smoothing, words = ctx.exchanged
        slope = (z.to(logarithm.dtype) - logarithm.unsqueeze(-1)).exp_()
        if smoothing:
            slope -= smoothing / words
        slope.scatter_add_(-1, local, -(1 - smoothing) * mine.unsqueeze(-1).to(slope.dtype))
        slope *= (grad.to(slope.dtype) * counted).unsqueeze(-1)
        return slope.to(z.dtype), None, None, None


def _getter(name: str) -> Function:
    """Return the function under which torch asks for an attribute."""
    found: Function = vars(torch._C.TensorBase)[name].__get__
    return found


HANDLERS: Mapping[Function, Function] = {
    **dict.fromkeys((Tensor.size, _getter("shape")), _shape),
    **dict.fromkeys((Tensor.numel, Tensor.nelement), _numel),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _view),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.__getitem__: _item,
    Tensor.__repr__: _text,
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys(
        (
            *(
                Tensor.float,
                Tensor.double,
                Tensor.half,
                Tensor.bfloat16,
                Tensor.to,
                Tensor.type_as,
                Tensor.contiguous,
                Tensor.clone,
            ),
            *(
                Tensor.detach,
                Tensor.cpu,
                Tensor.cuda,
                torch.clone,
                Tensor.tanh,
                torch.tanh,
                Tensor.neg,
                Tensor.__neg__,
                torch.neg,
            ),
            *(
                Tensor.mul,
                Tensor.__mul__,
                Tensor.__rmul__,
                torch.mul,
                Tensor.div,
                Tensor.__truediv__,
                torch.div,
            ),
        ),
        _on_part,
    ),
    **dict.fromkeys(
        (
            *(
                Tensor.dim,
                Tensor.ndimension,
                Tensor.requires_grad_,
                Tensor.register_hook,
                Tensor.is_floating_point,
            ),
            *(
                Tensor.is_contiguous,
                Tensor.get_device,
                Tensor.is_complex,
                torch.is_floating_point,
                torch.is_complex,
                Tensor.__hash__,
            ),
            *(
                _getter(name)
                for name in (
                    "dtype",
                    "device",
                    "ndim",
                    "requires_grad",
                    "is_leaf",
                    "grad_fn",
                    "is_cuda",
                    "layout",
                    "_version",
                )
            ),
        ),
        _about_part,
    ),
}
