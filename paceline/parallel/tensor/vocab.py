"""Logits with their words divided between workers, and their cross entropy without gathering them.

    logits = model(x)                                     shape (batch, tokens, words), as usual; in
                                                          memory words / workers
    F.cross_entropy(logits.view(-1, words), y.view(-1))   two exchanges of a few numbers per token
    logits.softmax(-1)                                    anything else gathers them first, which
                                                          is correct, but large

After Shoeybi et al., "Megatron-LM" (2019), section 3. Let z be the logits of a token, m their
maximum and t its target:

    loss = log(sum exp(z - m)) + m - z[t]                 sums and the maximum go over all workers
    gradient of z = softmax(z) - (1 at t)                 each worker has all that it needs
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
from paceline.parallel.tensor.exchanges import TensorAxis, exclude_from_compile

Function = Callable[..., Any]


class VocabLogits(Tensor):
    """Logits whose last dimension is divided. It looks like the whole tensor, and holds one part.

    Functions that don't touch the last dimension return another such tensor. `F.cross_entropy` is
    computed on the parts. All other functions get the whole tensor, which is a collective call: all
    workers that cut the layer must make it.
    """

    tensor_axis: TensorAxis
    words: int
    name_of_layer: str

    @staticmethod
    def wrap_part(local: Tensor, axis: TensorAxis, words: int, name: str) -> VocabLogits:
        """Present a worker's part as the whole tensor."""
        logits = local.as_subclass(VocabLogits)
        logits.__dict__.update(tensor_axis=axis, words=words, name_of_layer=name)
        return logits

    def local(self) -> Tensor:
        """This worker's part as a plain tensor."""
        # Private to torch, which documents it for such subclasses: functions inside of the block
        # don't go through `__torch_function__`. Without it, this would call itself.
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def wrap_like(self, local: Tensor) -> VocabLogits:
        """Present another part as the whole, for the same layer."""
        return VocabLogits.wrap_part(local, self.tensor_axis, self.words, self.name_of_layer)

    def whole(self) -> Tensor:
        """Gather the logits of all words, as a plain tensor. Collective."""
        return self.tensor_axis.join_output(self.local(), -1, self.name_of_layer)

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
        result = NotImplemented if handler is None else handler(func, args[0], args[1:], kwargs)
        if result is not NotImplemented:
            return result
        _refuse_changes(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_gather_logits(args), **_gather_logits(kwargs))


def _refuse_changes(func: Function, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `UsageError` for functions that write into logits: they would write into a copy."""
    name = getattr(func, "__name__", "")
    # Methods in place end in one underscore, as in add_; operators in place are such as __iadd__.
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


def _gather_logits(value: Any) -> Any:
    if isinstance(value, VocabLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(_gather_logits(item) for item in value)
    if isinstance(value, dict):
        return {name: _gather_logits(item) for name, item in value.items()}
    return value


# ---- functions that don't touch the words; a handler returns NotImplemented for other arguments


def _handle_shape(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    shape = torch.Size((*x.local().shape[:-1], x.words))
    dim = args[0] if args else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _handle_numel(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> int:
    return math.prod(_handle_shape(func, x, (), {}))


def _handle_elementwise(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Apply to the part what acts on each element in the same way."""
    asks_dtype = func in (Tensor.to, Tensor.type_as)  # another tensor gives its dtype alone
    others = [
        value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not asks_dtype
    ]
    # a factor's gradient needs all words
    if any(value.dim() or value.requires_grad for value in others):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        part = func(x.local(), *args, **kwargs)
    return x.wrap_like(part)


def _handle_property(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Read from the part, or from autograd, what is the same for the whole."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, *args, **kwargs)


def _handle_repr(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> str:
    """Describe the part alone: often one worker prints, and can't gather."""
    return (
        f"part {x.tensor_axis.rank} of {x.tensor_axis.size} of logits "
        f"{tuple(_handle_shape(func, x, (), {}))}: {x.local()!r}"
    )


def _handle_view(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """View in another shape, if the words stay the last dimension."""
    shape = kwargs.get(
        "shape",
        kwargs.get(
            "size",
            args[0] if len(args) == 1 and isinstance(args[0], tuple | list | torch.Size) else args,
        ),
    )
    if isinstance(shape, torch.dtype) or (len(shape) and isinstance(shape[0], torch.dtype)):
        return NotImplemented
    sizes, known_numel = list(shape), math.prod(size for size in shape if size != -1)
    if -1 in sizes:
        sizes[sizes.index(-1)] = _handle_numel(func, x, (), {}) // max(known_numel, 1)
    if not sizes or sizes[-1] != x.words or math.prod(sizes) != _handle_numel(func, x, (), {}):
        return NotImplemented
    return x.wrap_like(
        x.local().reshape(*sizes[:-1], -1)
        if func is not Tensor.view
        else x.local().view(*sizes[:-1], x.local().shape[-1])
    )


def _handle_flatten(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Flatten dimensions before the words."""
    start = kwargs.get("start_dim", args[0] if args else 0)
    end = kwargs.get("end_dim", args[1] if len(args) > 1 else -1)
    if end % x.dim() == x.dim() - 1 and start % x.dim() != x.dim() - 1:
        return NotImplemented
    return x.wrap_like(x.local().flatten(start, end))


def _handle_getitem(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
    """Take elements, if the index leaves the words alone."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    used = [item for item in index if item is not None and item is not Ellipsis]
    # A mask takes as many dimensions as it has; any other item takes one.
    taken = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1
        for item in used
    )
    plain = all(
        isinstance(item, int | slice | Tensor) and not isinstance(item, bool) for item in used
    )
    everything = bool(index) and isinstance(index[-1], slice) and index[-1] == slice(None)
    spread = any(item is Ellipsis for item in index)
    # The words are kept if the index ends before the last dimension, or takes all of it by `:`.
    keeps_words = (everything if spread and index[-1] is not Ellipsis else taken < x.dim()) or (
        everything and taken == x.dim()
    )
    if not plain or not keeps_words:
        return NotImplemented
    return x.wrap_like(x.local()[args[0]])


# ---- the loss


def _handle_cross_entropy(func: Function, x: VocabLogits, args: Any, kwargs: Any) -> Any:
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
    # In other shapes, the words are not the last dimension.
    if target.is_floating_point() or x.dim() != 2 or target.shape != x.shape[:1]:
        return NotImplemented
    return _compute_loss(
        x,
        target,
        int(given.get("ignore_index", -100)),
        reduction,
        float(given.get("label_smoothing", 0.0)),
    )


@exclude_from_compile
def _compute_loss(
    x: VocabLogits, target: Tensor, ignored: int, reduction: str, smoothing: float
) -> Tensor:
    local = x.local()
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()  # autocast computes cross_entropy in float32
    counted = target != ignored
    terms = _LossTerms(x.tensor_axis, x.name_of_layer, x.words, smoothing)
    losses: Tensor = _CrossEntropy.apply(local, target, counted, terms)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class _LossTerms(NamedTuple):
    axis: TensorAxis
    name: str
    words: int
    smoothing: float


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor, counted: Tensor, terms: _LossTerms) -> Tensor:
        axis, name, words, smoothing = terms
        # Check targets before they are used as indices; on a GPU without waiting for the device.
        wrong = counted & ((target < 0) | (target >= words))
        if z.device.type != "cpu":
            torch._assert_async(~wrong.any())
        elif bool(wrong.any()):
            raise UsageError(
                f"{name}: target {int(target[wrong][0])} is out of range; there are {words} words"
            )
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        largest = axis.reduce_tensor(wide.amax(-1), f"maximum of {name}", op="max")
        local = target - axis.rank * z.shape[-1]
        # The logit of the target is on one worker: `own` says whether it is here. Others add zero.
        own = counted & (local >= 0) & (local < z.shape[-1])
        local = local.masked_fill(~own, 0).unsqueeze(-1)
        shifted = wide - largest.unsqueeze(-1)
        hit = shifted.gather(-1, local).squeeze(-1).masked_fill(~own, 0)
        # One exchange for sums of exponentials, target logits and, for smoothing, sums of logits.
        sums = torch.stack([shifted.exp().sum(-1), hit, *([shifted.sum(-1)] if smoothing else [])])
        sums = axis.reduce_tensor(sums, f"sums of {name}", out=sums)
        logarithm = sums[0].log()
        losses = logarithm - sums[1]
        if smoothing:
            losses = losses * (1 - smoothing) + (logarithm - sums[2] / words) * smoothing
        ctx.save_for_backward(z, logarithm + largest, local, own, counted)
        ctx.record_wait = smoothing, words
        return losses.masked_fill(~counted, 0).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, logarithm, local, own, counted = ctx.saved_tensors
        smoothing, words = ctx.record_wait
        # The softmax, as exp(z - log of the sum), is computed again: saving it would need memory.
        slope = (z.to(logarithm.dtype) - logarithm.unsqueeze(-1)).exp_()
        if smoothing:
            slope -= smoothing / words
        slope.scatter_add_(-1, local, -(1 - smoothing) * own.unsqueeze(-1).to(slope.dtype))
        slope *= (grad.to(slope.dtype) * counted).unsqueeze(-1)
        return slope.to(z.dtype), None, None, None


def _attribute_getter(name: str) -> Function:
    """The function with which torch asks a subclass for an attribute: its getter."""
    # Private to torch: the class in C that has the attributes of all tensors. If it is renamed,
    # this import fails.
    getter: Function = vars(torch._C.TensorBase)[name].__get__
    return getter


HANDLERS: Mapping[Function, Function] = {
    **dict.fromkeys((Tensor.size, _attribute_getter("shape")), _handle_shape),
    **dict.fromkeys((Tensor.numel, Tensor.nelement), _handle_numel),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _handle_view),
    **dict.fromkeys((Tensor.flatten, torch.flatten), _handle_flatten),
    Tensor.__getitem__: _handle_getitem,
    Tensor.__repr__: _handle_repr,
    F.cross_entropy: _handle_cross_entropy,
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
        _handle_elementwise,
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
                _attribute_getter(name)
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
        _handle_property,
    ),
}
