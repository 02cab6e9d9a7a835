"""Compares cut modules with their undivided forward, once: all workers may be wrong alike.

    up (column) -> softmax of own features -> down (row)    equal on all workers, but wrong

The smallest module with a layer cut by columns and one cut by rows is run twice before its first
call, in evaluation mode and without gradients, with copies of its arguments: as it is, and with the
parts of all workers side by side. Whatever either run changes is set back.
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

from paceline.cluster.machine import measure_memory
from paceline.errors import PacelineError, UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.tensor.cut_layers import SequenceRegion, TensorCutModule, find_uncut_class
from paceline.parallel.tensor.exchanges import TensorAxis, exclude_from_compile
from paceline.parallel.tensor.peers import are_samples_close, sample_elements
from paceline.parallel.tensor.vocab import VocabLogits
from paceline.parallel.torch_dispatch import is_in_dispatch_mode

# Limits of differences, relative to the mean size of an element. Models in float64 often take norms
# and softmax in float32.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2}
# The limit for other dtypes; and the fraction of elements that may be beyond the limit, as a token
# may choose another expert.
LOOSE_LIMIT, OUTLIER_FRACTION = 5e-2, 0.01
SAMPLED = 1 << 16  # compared elements of an output
# Outcomes, from harmless to bad. AROUND: compare the module around. UNKNOWN: it draws random
# numbers. DIFFERENT: results differ. FAILED: the cut module raises, and the whole one doesn't.
SAME, AROUND, UNKNOWN, DIFFERENT, FAILED = range(5)
Settings = Mapping[str, Mapping[str, int]]


def watch_modules(
    model: nn.Module,
    axis: TensorAxis,
    pairs: tuple[Sequence[str], Sequence[str]],
    whole: Sequence[str],
    settings: Settings,
) -> None:
    """Compare modules in their first calls: the smallest with one of each of `pairs`, and `whole`.

    `settings` has the integers of modules that a cut has divided, with their values from before.
    """
    comparison = _UncutComparison(model, axis, settings)
    for name in whole:
        comparison.watch_module(name)
    for names, others in (pairs, pairs[::-1]):
        with_other = {around for other in others for around in _enclosing_names(other)}
        for name in names:
            comparison.watch_module(
                next(
                    (around for around in _enclosing_names(name) if around in with_other),
                    name.rpartition(".")[0],
                )
            )


def _enclosing_names(name: str) -> Iterator[str]:
    """Yield the names of the modules around one, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


class _UncutComparison:
    """Compares modules of one model, each once."""

    def __init__(self, model: nn.Module, axis: TensorAxis, settings: Settings) -> None:
        self._model, self._axis, self._settings, self._watched = model, axis, settings, set[str]()
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def watch_module(self, name: str) -> None:
        """Compare a module before its next call, or the nearest one around it with whole inputs."""
        # Modules inside of a region have pieces of the sequence, and containers are never called.
        name = next(
            (
                around
                for around in _enclosing_names(name)
                if isinstance(self._model.get_submodule(around), SequenceRegion)
            ),
            name,
        )
        while isinstance(self._model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            name = name.rpartition(".")[0]
        if name in self._watched:
            return
        self._watched.add(name)
        waiting = [True]

        @exclude_from_compile
        def compare(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if waiting and _has_values(module, args, options):
                waiting.clear()
                handle.remove()
                self._compare_module(name, module, args, options)

        handle = self._model.get_submodule(name).register_forward_pre_hook(
            compare, with_kwargs=True
        )

    def _compare_module(
        self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Run a module twice if all workers can, and raise `UsageError` if the results differ."""
        axis = self._axis
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        inputs = [sample_elements(leaf) for leaf in given if leaf.numel() and not leaf.is_complex()]
        answers = axis.gather_objects([self._can_compare(name, module), inputs], f"input of {name}")
        if not all(fits for fits, _ in answers):
            return
        # With different inputs, workers have parts here. Then the module around is compared.
        outcome, error = AROUND, None
        if all(are_samples_close(inputs, other) for _, other in answers):
            with torch.no_grad(), _restore_module(module):
                outcome, error = self._run_twice(name, module, args, options)
        where = f"tensor: {name or 'the model'} ({find_uncut_class(module).__name__})"
        if outcome == FAILED:
            raise UsageError(
                f"{where} works undivided, and fails when it is cut "
                f"({str(error).partition(chr(10))[0]}): a layer gets the features of "
                "this worker alone; cut it by row(), say column(gather=True) before it, or divide= "
                "numbers of heads"
            ) from error
        if outcome == DIFFERENT:
            raise UsageError(
                f"{where} returns other values when it is cut: "
                "between column() and row() something works over all features, "
                "and each worker has a part of them, such as a norm, softmax, mean or chunk; "
                "say column(parts=2) for a fused "
                "projection, divide= for numbers of heads, column(gather=True) and row(split=True) "
                "where all features are needed, or compare=False if this is meant"
            )
        if outcome == AROUND and name:
            self.watch_module(name.rpartition(".")[0])

    def _can_compare(self, name: str, module: nn.Module) -> bool:
        """Whether the parts are here, in their shapes, and there is memory for all, twice."""
        parameters, size = dict(module.named_parameters(prefix=name)), self._axis.size
        here = all(
            p.shape == self._shapes.get(each) and p.untyped_storage().nbytes() >= p.nbytes
            for each, p in parameters.items()
        )
        device = next(
            (parameter.device for parameter in parameters.values() if parameter.is_cuda), None
        )
        free = (
            measure_memory().free // size if device is None else torch.cuda.mem_get_info(device)[0]
        )
        return here and (
            not free or 2 * size * sum(parameter.nbytes for parameter in parameters.values()) < free
        )

    def _run_twice(
        self, name: str, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[int, Exception | None]:
        """Run a module cut and whole; return the worst outcome of all workers, and the error."""
        devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
        before = _random_states(devices)
        cut = _try_run(module, args, options)
        # maybe for its part alone
        drawn = not all(map(torch.equal, before, _random_states(devices)))
        error = cut if isinstance(cut, Exception) else None
        if isinstance(error, torch.OutOfMemoryError):  # the script's own call would fail as well
            raise error
        # All workers have to do the same from here on, so they agree on what they have seen.
        outcomes: list[int] = self._axis.gather_objects(
            UNKNOWN if drawn else AROUND if error else SAME, f"{name} as it is cut"
        )
        outcome = max(outcomes)
        if outcomes[0] != UNKNOWN and len(set(outcomes)) == 1:
            self._make_whole(name, module)
            outcome = max(
                self._axis.gather_objects(
                    _judge_outcome(module, cut, _try_run(module, args, options)), f"{name} uncut"
                )
            )
        for state, device in zip(before, (None, *devices), strict=True):
            if drawn and device is not None:
                torch.cuda.set_rng_state(state, device)
            elif drawn:
                torch.set_rng_state(state)
        return outcome, error

    def _make_whole(self, name: str, module: nn.Module) -> None:
        """Put all parts side by side, and undo the cut of layers, until `_restore_module`."""
        for inner, part in module.named_modules(prefix=name):
            if isinstance(part, TensorCutModule):
                for attribute, (dim, parts) in part.tensor_cut.dims.items():
                    part_here = part._parameters[attribute].unflatten(dim, (parts, -1))  # type: ignore[union-attr]
                    whole = self._axis.gather_pieces(
                        part_here, dim + 1, f"{attribute} of {part.tensor_cut.name}"
                    ).flatten(dim, dim + 1)
                    part._parameters[attribute] = Parameter(whole, requires_grad=False)
                part.__class__ = find_uncut_class(part)  # type: ignore[assignment]
            vars(part).update(self._settings.get(inner, {}))


def _has_values(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a call is for training, with values, and not one that torch only traces."""
    tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
    has_memory = not any(tensor.is_meta for tensor in (*tensors, *module.parameters()))
    # A selective checkpoint is such a mode: it would take results of the comparison for those of
    # the module.
    plain = not is_in_dispatch_mode()
    return bool(tensors) and has_memory and plain and torch.is_grad_enabled()


def _random_states(devices: set[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


@contextmanager
def _restore_module(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation, with copies of its state; set back everything at the end."""
    before = [
        (part, type(part), dict(vars(part)))
        for part in module.modules()
        if not isinstance(part, torch.jit.ScriptModule)
    ]
    for part, _, held in before:
        # Without gradients: autocast would cache casts of the parameters, and use those without a
        # graph later, when gradients are needed.
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
        # The attributes of `nn.Module` are private. `_compiled_call_impl` is set by
        # module.compile().
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


class _CopyMode(TorchFunctionMode):
    """Lets deepcopy copy tensors that have a graph, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            args[0].detach().clone()
            if func is Tensor.__deepcopy__
            else func(*args, **(kwargs or {}))
        )


def _copy_values(value: Any) -> Any:
    with _CopyMode():
        return copy.deepcopy(value)


def _try_run(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> list[Tensor] | Exception:
    """Run a forward on copies of the arguments; return its tensors, or its error.

    Hooks of the module itself are not called.
    """
    try:
        args, options = _copy_values((args, options))
        leaves = tree_leaves(module.forward(*args, **options))
        return [
            leaf.whole() if isinstance(leaf, VocabLogits) else leaf
            for leaf in leaves
            if isinstance(leaf, Tensor)
        ]
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001
        # A script's module may raise anything if it is called once more, or with other sizes.
        return error


def _judge_outcome(
    module: nn.Module, cut: list[Tensor] | Exception, whole: list[Tensor] | Exception
) -> int:
    """Compare the results of a module as it is cut and whole."""
    if isinstance(cut, Exception) or isinstance(whole, Exception):
        return AROUND if isinstance(whole, Exception) else FAILED
    pairs = [
        (one, two)
        for one, two in zip(cut, whole, strict=False)
        if one.shape == two.shape and one.is_floating_point()
    ]
    # Different shapes: the module returns parts of features.
    if not pairs or len(cut) != len(whole):
        return AROUND
    kinds = {tensor.dtype for tensor in (*module.parameters(), *cut) if tensor.is_floating_point()}
    kinds |= {
        torch.get_autocast_dtype(kind)
        for kind in {tensor.device.type for tensor in cut}
        if torch.is_autocast_enabled(kind)
    }
    limit = max(LIMITS.get(kind, LOOSE_LIMIT) for kind in kinds)
    return SAME if all(_are_close(one, two, limit) for one, two in pairs) else DIFFERENT


def _are_close(one: Tensor, two: Tensor, limit: float) -> bool:
    """Whether two tensors are equal within a limit, but for few elements."""
    # An odd step: an even one might meet the same features in each row.
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
    ) <= OUTLIER_FRACTION * len(y)
