"""Units of a model whose parameters are whole only while they are used (zero=3).

    forward     gather, run, release                   the root unit stays whole until the pass ends
    backward    an output gets its gradient: gather    release once all parameters of the unit, and
                                                       all its inputs, have their gradients
    the end     release all units that are still whole

While a unit runs, the next one is gathered: the unit that followed in the forward before, or, in
backward, the unit that preceded in forward.

A backward in two halves (pipelines) leaves units whole after the first half, in which no parameter
gets a gradient. If a forward releases them meanwhile, the second half gathers them again.

A forward inside of a backward pass (activation checkpoints) finds the unit whole. Or else it makes
the unit whole, until the pass ends.
"""

from __future__ import annotations

import dis
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.backward_pass import is_inside_backward
from paceline.comm.group_protocol import Work
from paceline.errors import UsageError
from paceline.parallel.containers import find_hidden_tensors, tree_leaves, tree_map_only
from paceline.parallel.sharding.flat_memory import FlatMemory


class UnitCall:
    """One forward of a unit.

    `input_count` counts the inputs that need gradients, and `missing_inputs` those of them without
    one in this pass. `last_pass` is the number of the last backward pass that came to this call.
    """

    def __init__(self) -> None:
        self.input_count = self.missing_inputs = self.last_pass = 0


class GatheredUnit:
    """A module that is gathered before it runs. Its parameters lie in `memories`.

    The root unit has the name "", and is the model itself.

    Invariants:
        `_gathers` has the gathers that have begun and are not awaited yet.
        `_calls` has the forwards under way. A module that calls itself has several.
        `_active_calls` has the calls that this backward pass is inside of.
        `_missing_gradients` counts the missing gradients of this pass, for each trained memory.
        In backward the unit is released when there are no active calls and no missing gradients,
        unless it is the root or `_stays_whole`.
    """

    def __init__(
        self, module: nn.Module, memories: Sequence[FlatMemory], name: str, *, model: GatheredModel
    ) -> None:
        self.module, self.memories, self.name, self.model = module, list(memories), name, model
        self._is_root = not name
        self._gathers: list[tuple[FlatMemory, Work[list[Tensor]]]] = []
        self._missing_gradients: dict[int, int] = {}  # by id of a memory
        self._active_calls: set[UnitCall] = set()
        # Whether the unit stays whole until the pass ends.
        self._stays_whole = False
        self._pass_number = 0  # number of the pass
        self._reset_pass()
        module.register_forward_pre_hook(
            disable_compile(self._begin_forward), prepend=True, with_kwargs=True
        )
        module.register_forward_hook(
            disable_compile(self._end_forward), with_kwargs=True, always_call=True
        )
        owners = {
            id(owner): owner
            for memory in self.memories
            for one in memory.parameters
            for owner, _ in one.places
        }
        for owner in owners.values() if name else ():  # the root stays whole in backward anyway
            if owner is not module:
                owner.register_forward_hook(self._hook_inner_output)
        self._calls: list[UnitCall] = []
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: Any) -> GatheredUnit:
        # The hooks of a copied module stay those of the original, and refuse calls of the copy.
        return self

    def _reset_pass(self) -> None:
        """Get ready for the next backward pass."""
        self._missing_gradients = {
            id(memory): len(memory.parameters) for memory in self.memories if memory.is_trained
        }
        self._active_calls.clear()
        self._stays_whole = False
        self._pass_number += 1

    # ---- forward

    def _begin_forward(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Gather the unit, and show its whole parameters to the module, before its forward."""
        if module is not self.module:
            raise UsageError(
                "a copy of the model that shard(zero=3) has cut was called (its module "
                f"{self.name or 'at the root'}), which has parts of "
                "parameters alone; call the model itself"
            )
        # Inside of backward, this is an activation checkpoint that computes the unit again.
        inside = is_inside_backward()
        if self._is_root and not inside and not self._calls:
            self.model.begin_forward()
        self.gather()
        if not inside:
            self.model.note_forward(self)
        # Nothing would release it: the pass doesn't come to the outputs of this call.
        if inside and not self._active_calls:
            self._stays_whole = True
        self._show_parameters(whole=True)
        args, options = self._cast_inputs(args), self._cast_inputs(options)
        call = UnitCall()
        self._calls.append(call)
        # Count the inputs that get gradients: with the last one, backward through this call is
        # over.
        if torch.is_grad_enabled() and not inside:
            for tensor in _find_differentiable((args, options)):
                call.input_count += 1
                handle = tensor.register_hook(partial(self._count_input_gradient, call))
                # A leaf outlives the graph, and with it the hook would.
                if tensor.is_leaf:
                    self._handles.append(handle)
        return args, options

    def _end_forward(self, module: nn.Module, args: Any, options: Any, output: Any) -> Any:
        """Show the pieces again, hook the outputs' gradients, and release, after a forward."""
        if not self._calls:  # `_begin_forward` has raised
            return output
        call = self._calls.pop()
        # A hook that is always called gets None for the output if the forward has raised.
        if self._is_root and output is None and (error := sys.exc_info()[1]) is not None:
            self.model.explain_error(error)
        if not self._calls:
            self._show_parameters(whole=False)
        if is_inside_backward():
            return output
        hooked = False
        if torch.is_grad_enabled():
            # A hook on a view is lost if the view is written to, so a view becomes a tensor of its
            # own. `_base` is private to torch, and what its own FSDP looks at: None for what is no
            # view.
            output = tree_map_only(
                Tensor,
                lambda leaf: (
                    leaf.clone() if leaf.requires_grad and leaf._base is not None else leaf
                ),
                output,
            )
            for leaf in (
                *_find_differentiable(output),
                *(x for x in find_hidden_tensors(output) if x.requires_grad),
            ):
                leaf.register_hook(partial(self._begin_backward, call))
                hooked = True
        # The root stays whole for the backward pass, if there will be one.
        if not self._calls and not (hooked and self._is_root):
            self.release()
        return output

    def _hook_inner_output(self, owner: nn.Module, args: Any, output: Any) -> None:
        """Let the output's gradient gather the unit; a hook after the forward of each inner layer.

        A script may compute a loss of an inner output. No gradient of the unit's own outputs comes
        then.
        """
        if (
            torch.compiler.is_compiling()
            or not self._calls
            or not torch.is_grad_enabled()
            or is_inside_backward()
        ):
            return
        for leaf in _find_differentiable(output):
            if leaf._base is None:
                leaf.register_hook(partial(self._gather_for_layer, self._calls[-1]))

    def _cast_inputs(self, values: Any) -> Any:
        # Inputs get the dtype of gathered parameters, such as bfloat16.
        dtypes = {memory.dtype for memory in self.memories if memory.dtype != memory.kept_dtype}
        if not dtypes:
            return values
        dtype = dtypes.pop()
        return tree_map_only(
            Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
        )

    # ---- backward

    def _begin_backward(self, call: UnitCall, _: Tensor) -> None:
        """Gather before the backward of a call, as the gradient of an output has come."""
        if call not in self._active_calls:
            call.missing_inputs, call.last_pass = call.input_count, self._pass_number
            self._active_calls.add(call)
        self.gather()
        self.model.note_backward(self)

    def _gather_for_layer(self, call: UnitCall, grad: Tensor) -> None:
        """Gather before an inner layer's backward: maybe no output of the unit has a gradient."""
        if call.last_pass != self._pass_number:
            self._begin_backward(call, grad)
        else:
            self.gather()

    def _count_input_gradient(self, call: UnitCall, _: Tensor) -> None:
        """Count the gradient of an input; with the last one, the call is done."""
        call.missing_inputs -= 1
        if call.missing_inputs == 0:
            self._active_calls.discard(call)
            self._release_if_done()

    def note_gradient(self, memory: FlatMemory) -> None:
        """Count a gradient of a parameter; with the last one, calls without inputs are done."""
        if id(memory) in self._missing_gradients:
            self._missing_gradients[id(memory)] -= 1
            if not self._missing_gradients[id(memory)]:
                self._active_calls = {call for call in self._active_calls if call.input_count}
                self._release_if_done()

    def gather_for(self, parameters: Set[int]) -> None:
        """Make the unit whole if it has one of these whole parameters, given by their ids."""
        if any(id(whole) in parameters for memory in self.memories for whole in memory.wholes):
            self.gather()

    def _release_if_done(self) -> None:
        if (
            not self._is_root
            and not self._active_calls
            and not self._stays_whole
            and not any(self._missing_gradients.values())
        ):
            self.release()

    def end_pass(self) -> None:
        self._reset_pass()
        self._calls.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._show_parameters(whole=False)
        self.release()

    # ---- memory

    def begin_gather(self) -> None:
        """Begin to gather all memories that aren't whole; they travel at once."""
        if not self._gathers:
            absent = [memory for memory in self.memories if not memory.is_whole]
            for memory in absent:
                memory.check_requires_grad()
            self._gathers = [(memory, memory.begin_gather(_gather_reason())) for memory in absent]

    def gather(self) -> None:
        """Make all memories whole."""
        self.begin_gather()
        for memory, work in self._gathers:
            memory.end_gather(work)
        self._gathers = []

    def release(self) -> None:
        """Free all memories; await those on their way first, as their gathers are collective."""
        if self._gathers:
            self.gather()
        for memory in self.memories:
            if memory.is_whole:
                memory.release()

    def _show_parameters(self, *, whole: bool) -> None:
        for memory in self.memories:
            memory.show_parameters(whole=whole)


class GatheredModel:
    """The units of one model, and the order in which forwards use them, to gather ahead."""

    def __init__(self) -> None:
        self.units: list[GatheredUnit] = []
        self._order: list[GatheredUnit] = []  # in the last forward, or the one under way
        self._previous_order: list[GatheredUnit] = []  # in the forward before that
        self._index: dict[int, int] = {}  # place in `_order` by id of a unit

    def begin_forward(self) -> None:
        """Release units that an earlier forward has left whole, as pieces may have changed."""
        for unit in self.units:
            unit.release()
        self._order, self._previous_order = [], self._order

    def explain_error(self, error: BaseException) -> None:
        """Add a note to a forward's error if the failing lines use a piece of an idle unit."""
        # Names in the bytecode of the failing lines; a piece counts if all names of its path are
        # there.
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        names = {
            i.argval
            for code, at in places
            for i in dis.get_instructions(code)
            if i.positions and i.positions.lineno == at
        }
        for unit in self.units:
            for one in [one for memory in unit.memories for one in memory.parameters if unit.name]:
                if {part for part in one.name.split(".") if not part.isdigit()} <= names:
                    error.add_note(
                        f"shard(zero=3): {one.name} is a piece where its unit, {unit.name}, isn't "
                        f"running; leave {unit.name} out of "
                        "the units, so that its parameters are whole in all of the model, or use "
                        "them in its own forward alone"
                    )

    def note_forward(self, unit: GatheredUnit) -> None:
        """Note that a forward uses a unit, and begin to gather the next one.

        The next one is known if the forward before used this unit at the same index.
        """
        self._index[id(unit)] = at = len(self._order)
        self._order.append(unit)
        if at + 1 < len(self._previous_order) and self._previous_order[at] is unit:
            self._previous_order[at + 1].begin_gather()

    def note_backward(self, unit: GatheredUnit) -> None:
        """Begin to gather the unit before this one in forward, which backward uses next."""
        at = self._index.get(id(unit), 0)
        # the root is at 0, and whole
        if at > 1 and at < len(self._order) and self._order[at] is unit:
            self._order[at - 1].begin_gather()


def disable_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook, whose memory comes and goes."""
    # Private to torch; the public torch.compiler.disable calls this function.
    disabled: Callable[..., Any] = torch._dynamo.disable(hook)
    return disabled


def _gather_reason() -> str:
    """What parameters are gathered for: workers compare it, and errors quote it."""
    if is_inside_backward():
        return " for backward"
    return (
        f" for model(...) {'with' if torch.is_grad_enabled() else 'without'} gradients, which all "
        "workers have to call"
    )


def _find_differentiable(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)
