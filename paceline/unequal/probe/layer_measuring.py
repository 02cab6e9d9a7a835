"""Measures the layers of a script's model for `paceline plan`, and finds how it can be cut."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves
from paceline.parallel.following.followed_graph import follow_layers
from paceline.parallel.pipelining.layer_graph import LayerGraph, trace_layers
from paceline.parallel.pipelining.measuring import measure_layers, preserve_state
from paceline.parallel.pipelining.operations import look_up_path
from paceline.parallel.pipelining.tracing import Untraceable
from paceline.parallel.tensor.application import check_layers
from paceline.parallel.tensor.plans import find_plan
from paceline.parallel.torch_tensor import storage_key
from paceline.planner.cuts.layer_profile import CheckpointedLayers, LayerSteps, choose_checkpointed
from paceline.unequal.probe.model_call import ModelCall

TRIED_SIZES = range(2, 9)  # workers that may divide layers
REPEATS = 4  # measured repetitions of each layer


def find_tensor_sizes(model: nn.Module) -> tuple[int, ...]:
    """Find the numbers of workers that can divide the layers of a model by its own plan."""
    sizes = []
    for size in TRIED_SIZES:
        try:
            plan = find_plan(model, size)
            check_layers(model, plan.layers, plan.divide, size)
        except UsageError:
            continue
        sizes.append(size)
    return tuple(sizes)


def find_layer_graph(model: nn.Module) -> LayerGraph | None:
    """Find the layers of a model as `pipeline("auto")` would. None: there are no such layers."""
    try:
        return trace_layers(model, "auto")
    except Untraceable:
        pass
    except UsageError:
        return None
    try:
        return follow_layers(model, "auto")
    except UsageError:
        return None


def measure_micro_batches(
    graph: LayerGraph, call: ModelCall, samples: Sequence[int], whole: int
) -> tuple[LayerSteps, ...]:
    """Measure all layers with micro-batches of several sizes, the smallest first.

    Args:
        graph: The layers.
        call: A call with the whole batch.
        samples: Sizes of the micro-batches.
        whole: Samples of the whole batch.

    Returns:
        Nothing if the layers can't be run one by one.
    """
    steps = []
    for count in sorted(set(samples)):
        part = call.take_rows(count, whole)
        criterion = None if call.loss is None else part.compute_loss
        try:
            costs = measure_layers(graph, part.args, part.kwargs, loss=criterion, repeats=REPEATS)
        except (UsageError, RuntimeError):
            # Layers that only work in the whole model are no layers of a pipeline.
            return ()
        steps.append(LayerSteps(count, tuple(costs)))
    return tuple(steps)


def measure_checkpoints(call: ModelCall, layers: Sequence[LayerSteps]) -> CheckpointedLayers:
    """Count how many bytes autograd keeps less with activation checkpoints, of the whole batch."""
    names = choose_checkpointed(layers[-1].costs)
    if not names:
        return CheckpointedLayers()
    try:
        saved = _count_kept(call, ()) - _count_kept(call, names)
    except RuntimeError:
        # Some of the layers can't be checkpointed.
        return CheckpointedLayers()
    return CheckpointedLayers(names, max(0, saved))


def _count_kept(call: ModelCall, names: Sequence[str]) -> int:
    """Count the bytes that a forward keeps if these modules are checkpointed."""
    model, kept = call.model, dict[int, int]()
    parameters = {storage_key(parameter) for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in parameters:
            kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def run_checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A checkpoint keeps its inputs where hooks don't see them.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                keep(leaf)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(preserve_state(model))
        for name in names:
            module = look_up_path(model, name)
            replaced = functools.partial(run_checkpointed, module.forward)
            stack.callback(_restore_forward, module, vars(module).get("forward"))
            module.forward = replaced
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        # Not the model itself: hooks would take this for a step.
        output = model.forward(*call.args, **call.kwargs)
        total = sum(kept.values())
        del output
    return total


def _restore_forward(module: nn.Module, own: Any) -> None:
    """Give a module its own forward back, or that of its class."""
    if own is None:
        del module.forward
    else:
        module.forward = own
