"""Units of a model whose parameters are whole only while they are used (zero=3).

    forward     gather, run, release                      the root unit stays whole until the
                                                          backward pass has ended
    backward    the gradient of an output comes: gather   all of the unit's gradients and those of
                                                          its inputs have come: release
    the end     all that is still whole is released

While a unit runs, the one that came after it in the forward before is on its way; in backward, the
one that came before it.

A backward in two halves (pipelines) leaves units whole after the first, as no gradient of theirs
has come, and gathers them again for the second where a forward has released them meanwhile.

A forward in the middle of a backward pass (activation checkpoints) finds the unit whole, or makes
it so until the pass ends.
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

from paceline.comm.group import Work
from paceline.errors import UsageError
from paceline.parallel.containers import hidden_tensors, tree_leaves, tree_map_only
from paceline.parallel.sharding.memory import FlatMemory


class UnitCall:
    """One forward of a unit: how many of its inputs have no gradient yet.

    `entered`: the last backward pass that came to it.
    """

    def __init__(self) -> None:
        self.inputs = self.missing = self.entered = 0


class GatheredUnit:
    """A module whose parameters lie in `memories`, gathered before it runs.

    The root unit, which has no name, is the `model` itself.
    """

    def __init__(
        self, module: nn.Module, memories: Sequence[FlatMemory], name: str, *, model: GatheredModel
    ) -> None:
        self.module, self.memories, self.name, self.model = module, list(memories), name, model
        self._is_root = not name
        self._coming: list[tuple[FlatMemory, Work[list[Tensor]]]] = []
        # of each memory: gradients that haven't come in the pass under way
        self._waits: dict[int, int] = {}
        self._entered: set[UnitCall] = set()
        self._stays = False  # until the end of the pass
        self._pass = 0
        self._rewind()
        module.register_forward_pre_hook(uncompiled(self._before), prepend=True, with_kwargs=True)
        module.register_forward_hook(uncompiled(self._after), with_kwargs=True, always_call=True)
        owners = {
            id(owner): owner
            for memory in self.memories
            for one in memory.held
            for owner, _ in one.places
        }
        for owner in owners.values() if name else ():  # the root stays whole
            if owner is not module:
                owner.register_forward_hook(self._kept)
        self._calls: list[UnitCall] = []  # under way; a module that calls itself has several
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: Any) -> GatheredUnit:
        return self  # of the copied module, which is refused when it is called

    def _rewind(self) -> None:
        self._waits = {id(memory): len(memory.held) for memory in self.memories if memory.trained}
        self._entered.clear()
        self._stays = False
        self._pass += 1

    # ---- forward

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Any, Any]:
        if module is not self.module:
            raise UsageError(
                "a copy of the model that shard(zero=3) has cut was called (its module "
                f"{self.name or 'at the root'}), which has parts of "
                "parameters alone; call the model itself"
            )
        inside = in_backward()
        if self._is_root and not inside and not self._calls:
            self.model.forward_begins()
        self.gather()
        if not inside:
            self.model.ran(self)
        if inside and not self._entered:
            self._stays = True
        self._show(whole=True)
        args, options = self._cast(args), self._cast(options)
        call = UnitCall()
        self._calls.append(call)
        if torch.is_grad_enabled() and not inside:
            for tensor in _with_gradients((args, options)):
                call.inputs += 1
                handle = tensor.register_hook(partial(self._left, call))
                if tensor.is_leaf:  # it outlives the graph
                    self._handles.append(handle)
        return args, options

    def _after(self, module: nn.Module, args: Any, options: Any, output: Any) -> Any:
        if not self._calls:  # what came before has raised
            return output
        call = self._calls.pop()
        if self._is_root and output is None and (error := sys.exc_info()[1]) is not None:
            self.model.explain(error)
        if not self._calls:
            self._show(whole=False)
        if in_backward():
            return output
        kept = False
        if torch.is_grad_enabled():
            # a hook on a view is lost where the view is written to
            output = tree_map_only(
                Tensor,
                lambda leaf: (
                    leaf.clone() if leaf.requires_grad and leaf._base is not None else leaf
                ),
                output,
            )
            for leaf in (
                *_with_gradients(output),
                *(x for x in hidden_tensors(output) if x.requires_grad),
            ):
                leaf.register_hook(partial(self._entering, call))
                kept = True
        if not self._calls and not (kept and self._is_root):
            self.release()
        return output

    def _kept(self, owner: nn.Module, args: Any, output: Any) -> None:
        """Have a gradient gather that comes to a layer inside of the unit, as the script may
        keep what is made of its output.
        """
        if (
            torch.compiler.is_compiling()
            or not self._calls
            or not torch.is_grad_enabled()
            or in_backward()
        ):
            return
        for leaf in _with_gradients(output):
            if leaf._base is None:
                leaf.register_hook(partial(self._reached, self._calls[-1]))

    def _cast(self, values: Any) -> Any:
        dtypes = {memory.dtype for memory in self.memories if memory.dtype != memory.kept_dtype}
        if not dtypes:
            return values
        dtype = dtypes.pop()
        return tree_map_only(
            Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
        )

    # ---- backward

    def _entering(self, call: UnitCall, _: Tensor) -> None:
        """Gather before the backward of a call, whose first gradient has come."""
        if call not in self._entered:
            call.missing, call.entered = call.inputs, self._pass
            self._entered.add(call)
        self.gather()
        self.model.entered(self)

    def _reached(self, call: UnitCall, grad: Tensor) -> None:
        """Gather before the backward of a layer, whether the gradient of an output of the unit
        comes, too, or never does.
        """
        if call.entered != self._pass:
            self._entering(call, grad)
        else:
            self.gather()

    def _left(self, call: UnitCall, _: Tensor) -> None:
        call.missing -= 1
        if call.missing == 0:
            self._entered.discard(call)
            self._release_used()

    def gradient_came(self, memory: FlatMemory) -> None:
        if id(memory) in self._waits:
            self._waits[id(memory)] -= 1
            if not self._waits[id(memory)]:
                self._entered = {call for call in self._entered if call.inputs}
                self._release_used()

    def gather_for(self, parameters: Set[int]) -> None:
        """Make the unit whole, unless it has none of these whole parameters (ids), until their
        gradients have come.
        """
        if any(id(whole) in parameters for memory in self.memories for whole in memory.wholes):
            self.gather()

    def _release_used(self) -> None:
        if (
            not self._is_root
            and not self._entered
            and not self._stays
            and not any(self._waits.values())
        ):
            self.release()

    def pass_ended(self) -> None:
        self._rewind()
        self._calls.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._show(whole=False)
        self.release()

    # ---- memory

    def begin(self) -> None:
        """Begin to gather all parameters that are not whole; they travel at once."""
        if not self._coming:
            absent = [memory for memory in self.memories if not memory.whole]
            for memory in absent:
                memory.check()
            self._coming = [(memory, memory.begin_gather(_reason())) for memory in absent]

    def gather(self) -> None:
        """Make all parameters whole."""
        self.begin()
        for memory, work in self._coming:
            memory.end_gather(work)
        self._coming = []

    def release(self) -> None:
        """Free whole parameters, and those that are on their way once they have come."""
        if self._coming:
            self.gather()
        for memory in self.memories:
            if memory.whole:
                memory.release()

    def _show(self, *, whole: bool) -> None:
        for memory in self.memories:
            memory.show(whole=whole)


class GatheredModel:
    """The units of one model, and the order in which its last forward has used them: what will
    be used next is gathered ahead.
    """

    def __init__(self) -> None:
        self.units: list[GatheredUnit] = []
        self._order: list[GatheredUnit] = []
        self._before: list[GatheredUnit] = []  # the order of the forward before
        self._place: dict[int, int] = {}  # of each unit in the last forward

    def forward_begins(self) -> None:
        """Release what an earlier forward has left whole: its values may be those before a step."""
        for unit in self.units:
            unit.release()
        self._order, self._before = [], self._order

    def explain(self, error: BaseException) -> None:
        """Note on the error of a forward which pieces, of units that don't run, the failing
        lines use.
        """
        places = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        names = {
            i.argval
            for code, at in places
            for i in dis.get_instructions(code)
            if i.positions and i.positions.lineno == at
        }
        for unit in self.units:
            for one in [one for memory in unit.memories for one in memory.held if unit.name]:
                if {part for part in one.name.split(".") if not part.isdigit()} <= names:
                    error.add_note(
                        f"shard(zero=3): {one.name} is a piece where its unit, {unit.name}, isn't "
                        f"running; leave {unit.name} out of "
                        "the units, so that its parameters are whole in all of the model, or use "
                        "them in its own forward alone"
                    )

    def ran(self, unit: GatheredUnit) -> None:
        """Note that a unit is used in a forward, and gather the one that comes next, if it was
        as well in the forward before.
        """
        self._place[id(unit)] = at = len(self._order)
        self._order.append(unit)
        if at + 1 < len(self._before) and self._before[at] is unit:
            self._before[at + 1].begin()

    def entered(self, unit: GatheredUnit) -> None:
        """Gather the unit that came before this one in the last forward, as it comes next in the
        backward pass.
        """
        at = self._place.get(id(unit), 0)
        if at > 1 and at < len(self._order) and self._order[at] is unit:  # the root, at 0, is there
            self._order[at - 1].begin()


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out of a hook, whose memory comes and goes."""
    disabled: Callable[..., Any] = torch._dynamo.disable(hook)
    return disabled


def in_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def _reason() -> str:
    """Return what parameters are gathered for, so that errors say what a worker does that others
    don't.
    """
    if in_backward():
        return " for backward"
    return (
        f" for model(...) {'with' if torch.is_grad_enabled() else 'without'} gradients, which all "
        "workers have to call"
    )


def _with_gradients(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)
