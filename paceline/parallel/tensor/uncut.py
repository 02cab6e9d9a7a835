"""Compares modules that are cut with a forward that isn't, once: what is wrong on all workers alike
differs between none of them.

    up (column) -> softmax of my features -> down (row)      equal on all workers, and not what the
                                                             script means

The smallest module with a layer cut by columns and one cut by rows is run twice before its first
call, with copies of its arguments, in evaluation and without gradients: as it is, and with the
parts of all workers side by side. What either run changes is set back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.cluster.machine import memory_size
from paceline.errors import PacelineError, UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.tensor.functions import TensorAxis, eager
from paceline.parallel.tensor.layers import SequenceRegion, TensorCutModule, uncut_class
from paceline.parallel.tensor.peers import alike, sample
from paceline.parallel.tensor.vocab import VocabLogits

# Of a difference, relative to the mean size of an element. Norms and softmax of models in float64
# are often taken in float32.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2}
# the limit for other dtypes, and how many elements may be beyond it: a token may choose another
# expert
LOOSE, FEW = 5e-2, 0.01
SAMPLED = 1 << 16  # elements of an output
# What comes of a comparison. AROUND: the module around has to be compared instead; FAILED: what is
# cut raises, and what is whole doesn't.
SAME, AROUND, UNKNOWN, OTHER, FAILED = range(5)
Settings = Mapping[str, Mapping[str, int]]


def watch(
    model: nn.Module,
    axis: TensorAxis,
    pairs: tuple[Sequence[str], Sequence[str]],
    whole: Sequence[str],
    settings: Settings,
) -> None:
    """Compare modules of a model in their first calls: the smallest with one of each of `pairs`,
    and those of `whole`.

    `settings`: whole numbers of modules that a cut has divided, as they were.
    """
    comparison = _Comparison(model, axis, settings)
    for name in whole:
        comparison.watch(name)
    for names, others in (pairs, pairs[::-1]):
        having = {around for other in others for around in _around(other)}
        for name in names:
            comparison.watch(
                next(
                    (around for around in _around(name) if around in having),
                    name.rpartition(".")[0],
                )
            )


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class _Comparison:
    """Compares modules of one model, each once."""

    def __init__(self, model: nn.Module, axis: TensorAxis, settings: Settings) -> None:
        self._model, self._axis, self._settings, self._watched = model, axis, settings, set[str]()
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def watch(self, name: str) -> None:
        """Compare a module before its next call, or the nearest around it that is called with
        what is whole.
        """
        name = next(
            (
                around
                for around in _around(name)
                if isinstance(self._model.get_submodule(around), SequenceRegion)
            ),
            name,
        )
        # which is never called
        while isinstance(self._model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            name = name.rpartition(".")[0]
        if name in self._watched:
            return
        self._watched.add(name)
        waiting = [True]

        @eager
        def compare(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if waiting and _has_values(module, args, options):
                waiting.clear()
                handle.remove()
                self._compare(name, module, args, options)

        handle = self._model.get_submodule(name).register_forward_pre_hook(
            compare, with_kwargs=True
        )

    def _compare(
        self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        axis = self._axis
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        inputs = [sample(leaf) for leaf in given if leaf.numel() and not leaf.is_complex()]
        found = axis.objects([self._fits(name, module), inputs], f"input of {name}")
        if not all(fits for fits, _ in found):
            return
        outcome, error = AROUND, None
        if all(alike(inputs, other) for _, other in found):
            with torch.no_grad(), _set_back(module):
                outcome, error = self._run_twice(name, module, args, options)
        where = f"tensor: {name or 'the model'} ({uncut_class(module).__name__})"
        if outcome == FAILED:
            raise UsageError(
                f"{where} works whole, and fails cut ({str(error).partition(chr(10))[0]}): "
                "a layer gets the features of "
                "this worker alone; cut it by row(), say column(gather=True) before it, or divide= "
                "numbers of heads"
            ) from error
        if outcome == OTHER:
            raise UsageError(
                f"{where} returns other numbers cut than whole: "
                "between column() and row() something works over features of which each worker has "
                "a "
                "part, such as a norm, softmax, mean or chunk; say column(parts=2) for a fused "
                "projection, divide= for numbers of heads, column(gather=True) and row(split=True) "
                "where all features are needed, or compare=False if this is meant"
            )
        if outcome == AROUND and name:
            self.watch(name.rpartition(".")[0])

    def _fits(self, name: str, module: nn.Module) -> bool:
        """Whether mine are here, in their shapes, and there is memory for those of all, twice."""
        parameters, size = dict(module.named_parameters(prefix=name)), self._axis.size
        here = all(
            p.shape == self._shapes.get(each) and p.untyped_storage().nbytes() >= p.nbytes
            for each, p in parameters.items()
        )
        device = next(
            (parameter.device for parameter in parameters.values() if parameter.is_cuda), None
        )
        free = memory_size().free // size if device is None else torch.cuda.mem_get_info(device)[0]
        return here and (
            not free or 2 * size * sum(parameter.nbytes for parameter in parameters.values()) < free
        )

    def _run_twice(
        self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[int, Exception | None]:
        """Return what all workers find, and how it fails cut."""
        devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
        before = _random_states(devices)
        cut = _try_run(module, args, options)
        # perhaps for the part of each worker
        drawn = not all(map(torch.equal, before, _random_states(devices)))
        error = cut if isinstance(cut, Exception) else None
        if isinstance(error, torch.OutOfMemoryError):  # the call itself needs more
            raise error
        found: list[int] = self._axis.objects(
            UNKNOWN if drawn else AROUND if error else SAME, f"{name} as it is cut"
        )
        outcome = max(found)
        if found[0] != UNKNOWN and len(set(found)) == 1:
            self._make_whole(name, module)
            outcome = max(
                self._axis.objects(
                    _outcome(module, cut, _try_run(module, args, options)), f"{name} uncut"
                )
            )
        for state, device in zip(before, (None, *devices), strict=True):
            if drawn and device is not None:
                torch.cuda.set_rng_state(state, device)
            elif drawn:
                torch.set_rng_state(state)
        return outcome, error

    def _make_whole(self, name: str, module: nn.Module) -> None:
        """Put the parts of all workers side by side, and let layers be what they were."""
        for inner, part in module.named_modules(prefix=name):
            if isinstance(part, TensorCutModule):
                for attribute, (dim, parts) in part.tensor_cut.dims.items():
                    mine = part._parameters[attribute].unflatten(dim, (parts, -1))  # type: ignore[union-attr]
                    whole = self._axis.side_by_side(
                        mine, dim + 1, f"{attribute} of {part.tensor_cut.name}"
                    ).flatten(dim, dim + 1)
                    part._parameters[attribute] = Parameter(whole, requires_grad=False)
                part.__class__ = uncut_class(part)  # type: ignore[assignment]
            vars(part).update(self._settings.get(inner, {}))


def _has_values(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether this is a call for training, and not one in which torch only follows what is done."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    known = not any(tensor.is_meta for tensor in (*tensors, *module.parameters()))
    # Private: without it, a selective checkpoint would keep results of the comparison, for its own.
    plain = _get_current_dispatch_mode() is None
    return bool(tensors) and known and plain and torch.is_grad_enabled()


def _random_states(devices: set[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@contextmanager
def _set_back(module: nn.Module) -> Iterator[None]:
    """Let a module be in evaluation, with values that may be changed, and set back all that it
    holds.
    """
    before = [
        (part, type(part), dict(vars(part)))
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ]
    for part, _, held in before:
        # without gradients: autocast would keep their casts, and go on with those where gradients
        # are wanted
        parameters = {
            name: None if parameter is None else Parameter(parameter.detach(), requires_grad=False)
            for name, parameter in part._parameters.items()
        }
        buffers = {
            name: None if buffer is None else buffer.clone()
            for name, buffer in part._buffers.items()
        }
        vars(part).update(
            {
                name: copy.copy(value)
                for name, value in held.items()
                if type(value) in (list, dict, set)
            }
        )
        vars(part).update(
            training=False, _parameters=parameters, _buffers=buffers, _compiled_call_impl=None
        )
    try:
        yield
    finally:
        for part, kind, held in before:
            part.__class__ = kind
            vars(part).clear()
            vars(part).update(held)


class _Copying(TorchFunctionMode):
    """Lets deepcopy copy tensors that have a history, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].detach().clone()
            if func is Tensor.__deepcopy__
            else func(*args, **(kwargs or {}))
        )


def _copied(value: Any) -> Any:
    with _Copying():
        return copy.deepcopy(value)


def _try_run(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> list[Tensor] | Exception:
    """Return the tensors of a forward with copies of the arguments, without the hooks of the
    module itself, or why it fails.
    """
    try:
        args, options = _copied((args, options))
        leaves = tree_leaves(module.forward(*args, **options))
        return [
            leaf.whole() if isinstance(leaf, VocabLogits) else leaf
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001
        # a script's module may raise anything where it is called once more, or with other sizes
        return error


def _outcome(
    module: nn.Module, cut: list[Tensor] | Exception, whole: list[Tensor] | Exception
) -> int:
    if isinstance(cut, Exception) or isinstance(whole, Exception):
        return AROUND if isinstance(whole, Exception) else FAILED
    pairs = [
        (one, two)
        for one, two in zip(cut, whole, strict=False)
        if one.shape == two.shape and one.is_floating_point()
    ]
    if not pairs or len(cut) != len(whole):  # parts of features are handed on
        return AROUND
    kinds = {tensor.dtype for tensor in (*module.parameters(), *cut) if tensor.is_floating_point()}
    kinds |= {
        torch.get_autocast_dtype(kind)
        for kind in {tensor.device.type for tensor in cut}
        if torch.is_autocast_enabled(kind)
    }
    limit = max(LIMITS.get(kind, LOOSE) for kind in kinds)
    return SAME if all(_near(one, two, limit) for one, two in pairs) else OTHER


def _near(one: Tensor, two: Tensor, limit: float) -> bool:
    # odd: an even one might meet the same features again and again
    step = one.numel() // SAMPLED | 1
    x, y = (
        tensor.reshape(-1)[::step].float()
        if tensor.dtype != torch.float64
        else tensor.reshape(-1)[::step]
        for tensor in (one, two)
    )
    scale = float(y.nan_to_num(0, 0, 0).abs().mean()) if len(y) else 0.0
    return int(
        (~torch.isclose(x, y, rtol=limit, atol=limit * scale, equal_nan=True)).sum()
    ) <= FEW * len(y)
