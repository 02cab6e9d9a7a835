"""`DistributedOptimizer`: an optimizer that steps with the gradients of all ranks.

    loss.backward()      a gradient is ready -> its allreduce begins      hook of the parameter
    optimizer.step()     the rest begins, and all end                     synchronize
                         the optimizer's own step

Parameters form units, which travel as one operation: of one parameter each, or of `groups`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.torch.compression import Compression
from paceline.bridges.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    size,
    sparse_allreduce_async,
    synchronize,
)

Unit = tuple[Tensor, ...]
_EARLY_ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
_TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)


class GradientReducer:
    """Reduces the gradients of some parameters, each as soon as it is ready.

    Invariants: a parameter is in `_passes_left` if it needs gradients; it counts down to 0, when
    its gradient may leave. A unit is in `_pending` from its submission to `finish`.

    Args:
        units: Parameters that travel together.
        names: Name of each parameter, equal on all ranks.
        compression: What is done to gradients on their way.
        passes: Number of backward passes before a gradient leaves.
        options: Options of the allreduce.
        sparse_as_dense: Whether sparse gradients travel as dense ones.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        names: dict[Tensor, str],
        *,
        compression: Any,
        passes: int,
        options: dict[str, Any],
        sparse_as_dense: bool,
    ) -> None:
        self._units, self._names, self._compression = units, names, compression
        self._passes, self._options, self._sparse_as_dense = passes, options, sparse_as_dense
        self._unit_of = {p: unit for unit in units for p in unit}
        self._passes_left = dict.fromkeys(self._unit_of, passes)
        self._pending: dict[Unit, Callable[[], None]] = {}
        for p in self._unit_of:
            p.register_post_accumulate_grad_hook(self._count_pass)

    @property
    def is_active(self) -> bool:
        """Whether there are other ranks to reduce with."""
        process_set: ProcessSet = self._options["process_set"]
        return process_set.included() and (process_set.size() or 0) > 1

    @property
    def has_begun(self) -> bool:
        """Whether gradients have been computed since the last step."""
        return bool(self._pending) or any(
            left < self._passes for left in self._passes_left.values()
        )

    def restart(self, passes: int | None = None) -> None:
        """Forget what has been computed, and set the number of passes."""
        self._pending.clear()
        self._passes = self._passes if passes is None else passes
        self._passes_left = dict.fromkeys(self._passes_left, self._passes)

    def finish(self) -> None:
        """Reduce what hasn't left yet, zeros for gradients that don't exist, and wait for all."""
        if self.is_active:
            for unit in self._units:
                if unit not in self._pending:
                    self._submit_unit(unit)
            for wait in self._pending.values():
                wait()
        self.restart()

    def _count_pass(self, p: Tensor) -> None:
        if not self.is_active:
            return
        if self._passes_left[p] <= 0:
            raise AssertionError(_TOO_MANY_PASSES)
        self._passes_left[p] -= 1
        unit = self._unit_of[p]
        if not any(self._passes_left[other] for other in unit):
            self._submit_unit(unit)

    def _submit_unit(self, unit: Unit) -> None:
        for p in unit:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        name = self._names[unit[0]]
        grads = [p.grad for p in unit if p.grad is not None]
        if grads[0].is_sparse and len(unit) == 1 and not self._sparse_as_dense:
            self._submit_sparse(unit[0], grads[0], name)
            return
        if any(grad.is_sparse for grad in grads) and not self._sparse_as_dense:
            raise ValueError(
                f"{name}: sparse gradients can't travel in groups: sparse_as_dense=True"
            )
        packed = [
            self._compression.compress(grad.to_dense() if grad.is_sparse else grad.contiguous())
            for grad in grads
        ]
        tensors = [tensor for tensor, _ in packed]
        if len(unit) == 1:
            handle = allreduce_async_(tensors[0], name=name, **self._options)
        else:
            handle = grouped_allreduce_async_(tensors, name=name, **self._options)

        def wait() -> None:
            synchronize(handle)
            for p, grad, (tensor, ctx) in zip(unit, grads, packed, strict=True):
                reduced = self._compression.decompress(tensor, ctx)
                if grad.is_sparse:
                    p.grad = reduced.to_sparse(grad.sparse_dim())
                elif reduced is not grad:
                    grad.copy_(reduced)

        self._pending[unit] = wait

    def _submit_sparse(self, p: Tensor, grad: Tensor, name: str) -> None:
        collect = sparse_allreduce_async(
            grad, name=name, op=self._options["op"], process_set=self._options["process_set"]
        )

        def wait() -> None:
            p.grad = collect()

        self._pending[(p,)] = wait


class DistributedStep:
    """The methods that `DistributedOptimizer` puts in front of those of the user's optimizer.

    An object of this class is an object of the user's class too: see `DistributedOptimizer`.
    """

    _reducer: GradientReducer
    _parameter_names: dict[Tensor, str]
    backward_passes_per_step: int
    _synchronized = False
    _should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before gradients leave."""
        self.backward_passes_per_step = passes
        self._reducer.restart(passes)

    def load_state_dict(self, *args: Any, **options: Any) -> None:
        """Load a state, and forget gradients under way."""
        self._reducer.restart()
        self._synchronized, self._should_synchronize = False, True
        super().load_state_dict(*args, **options)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Wait until all gradients are those of all ranks, for example to clip them."""
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use gradients as they are: for a step after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of all ranks."""
        inner = super().step  # type: ignore[misc]
        if closure is not None:

            def reduce_after_closure() -> Any:
                loss = closure()
                self.synchronize()
                return loss

            result = inner(reduce_after_closure if self._should_synchronize else closure)
        else:
            if self._should_synchronize:
                self._warn_of_second_wait()
                self.synchronize()
            result = inner()
        self._synchronized = False
        return result

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Set gradients to zero. `AssertionError` if an allreduce of them is under way."""
        if self._reducer.has_begun:
            raise AssertionError(_EARLY_ZERO_GRAD)
        super().zero_grad(*args, **options)  # type: ignore[misc]

    def _warn_of_second_wait(self) -> None:
        if self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to "
                "consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code.",
                stacklevel=3,
            )


class AdasumStep:
    """The methods that `DistributedOptimizer` puts in front with `op=Adasum`.

    Each rank steps with its own gradients. Then changes of parameters are combined, not gradients.
    """

    param_groups: list[dict[str, Any]]
    _parameter_names: dict[Tensor, str]
    _compression: Any
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes between two steps. Gradients add up meanwhile."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: changes are combined in `step`."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raise `AssertionError`: changes are always combined."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank, and combine the changes of all ranks."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        before = [p.clone() for p in params]
        result = super().step(closure)  # type: ignore[misc]
        packed = [
            self._compression.compress((p - start).contiguous())
            for p, start in zip(params, before, strict=True)
        ]
        handles = [
            allreduce_async_(delta, name=self._parameter_names[p], op=Adasum)
            for p, (delta, _) in zip(params, packed, strict=True)
        ]
        for p, start, handle, (_, ctx) in zip(params, before, handles, packed, strict=True):
            p.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return result


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer that steps with the gradients of all ranks.

    Args:
        optimizer: The optimizer of one process. The new one shares its state.
        named_parameters: Pairs of names and parameters, such as `model.named_parameters()`.
            Default: numbers as names.
        compression: `Compression.none` (default) or `Compression.fp16`.
        backward_passes_per_step: Backward passes between two steps. Gradients add up. Default: 1.
        op: Average (default), Sum or Adasum.
        gradient_predivide_factor: With Average, f divides gradients before the sum, and multiplies
            them by f / size after it. Default: 1.
        num_groups: Older form of `groups`.
        groups: Number of groups in which gradients travel, or lists of parameters. Default: none.
        sparse_as_dense: Whether sparse gradients travel as dense ones. Default: False.
        process_set: Ranks whose gradients are combined. Default: all.

    Returns:
        An object of a class that derives from the class of `optimizer`.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    names = _name_parameters(optimizer, named_parameters)
    combines_changes = op == Adasum and size() > 1
    if combines_changes and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    methods = AdasumStep if combines_changes else DistributedStep
    kind: Any = type(optimizer.__class__.__name__, (methods, optimizer.__class__), {})
    wrapped = kind.__new__(kind)
    # `step` may be an attribute of the old optimizer: schedulers of the learning rate put it there
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    wrapped._parameter_names = names
    wrapped.backward_passes_per_step = backward_passes_per_step
    if combines_changes:
        wrapped._compression = compression
        return wrapped
    options: dict[str, Any] = {"op": op, "process_set": process_set}
    if op == Average:
        options["prescale_factor"] = 1.0 / gradient_predivide_factor
        options["postscale_factor"] = gradient_predivide_factor
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    wrapped._reducer = GradientReducer(
        _make_units(trained, groups),
        names,
        compression=compression,
        passes=backward_passes_per_step,
        options=options,
        sparse_as_dense=sparse_as_dense,
    )
    return wrapped


def _name_parameters(optimizer: torch.optim.Optimizer, named: Any) -> dict[Tensor, str]:
    """Give each parameter of the optimizer a name. Raises `ValueError` if names don't fit."""
    every = [
        (f"allreduce.noname.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    ]
    pairs = every if named is None else [*named]
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    counts = Counter(name for name, _ in pairs)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(repeated)}"
        )
    names = {p: name for name, p in pairs}
    if unnamed := [number for number, p in every if p not in names]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed)}, by group and place"
        )
    return names


def _make_units(params: Sequence[Tensor], groups: int | list[list[Tensor]] | None) -> list[Unit]:
    """Divide parameters into units: one each, that number of runs of them, or as the lists say."""
    if groups is None:
        return [(p,) for p in params]
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(
                f"groups is {groups}, and should be a positive integer or a list of list of "
                "torch.Tensor."
            )
        base, extra = divmod(len(params), groups)
        starts = [i * base + min(i, extra) for i in range(groups + 1)]
        runs = [tuple(params[a:b]) for a, b in pairwise(starts)]
        return [run for run in runs if run]
    listed = [p for group in groups for p in group]
    if not all(isinstance(p, Tensor) for p in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len({*listed}) < len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    trained = {*params}
    units = [tuple(p for p in group if p in trained) for group in groups]
    return [unit for unit in units if unit] + [(p,) for p in params if p not in {*listed}]
