"""What happens around the steps of optimizers whose parameters are pieces: whole parameters
follow them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.errors import UsageError
from paceline.parallel.elementwise import check_elementwise
from paceline.parallel.sharding.memory import FlatMemory

_REGISTRY: Final = threading.Lock()  # of announcers


class ShardSteps:
    """Gathers whole parameters after each step of an optimizer that has pieces of them, so that
    whatever reads them finds the new values.

    A step of the whole parameters themselves is refused: they have no gradients, and it would do
    nothing.
    """

    def __init__(self, memories: Sequence[FlatMemory]) -> None:
        self._memories = [memory for memory in memories if memory.trained]
        self._wholes = {
            id(whole): one.name
            for memory in self._memories
            if not memory.frees
            for one, whole in zip(memory.held, memory.wholes, strict=True)
        }
        # by each optimizer: how many parameters it had, and the memories of those that are pieces
        self._stepped = weakref.WeakKeyDictionary[Optimizer, tuple[int, list[FlatMemory]]]()
        _announce_to(self)

    def before(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` for an optimizer that can't step what this worker has."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known, memories = self._stepped.get(optimizer, (-1, []))
        if known != count:
            memories = self._meet(optimizer)
            self._stepped[optimizer] = count, memories
        for memory in memories:
            memory.check_memory()
            memory.check_gradients()

    def _meet(self, optimizer: Optimizer) -> list[FlatMemory]:
        """Return the memories of which an optimizer has pieces."""
        ids = {
            id(parameter): True for group in optimizer.param_groups for parameter in group["params"]
        }
        name = next((self._wholes[found] for found in ids if found in self._wholes), None)
        if name is not None:
            raise UsageError(
                f"a {type(optimizer).__qualname__} steps {name}, of which this worker has a piece "
                "to step; make the optimizer before "
                "run.prepare, and give it to the call that cuts the model"
            )
        memories = [
            memory for memory in self._memories if any(id(piece) in ids for piece in memory.pieces)
        ]
        if memories:
            check_elementwise(optimizer, memories[0].held[0].name)
        return memories

    def after(self, optimizer: Optimizer) -> None:
        """Gather the whole parameters of the pieces that an optimizer has stepped. Collective."""
        _, memories = self._stepped.get(optimizer, (0, []))
        follow([memory for memory in memories if not memory.frees])

    def refresh(self) -> None:
        """Make whole parameters what their pieces are, as these were changed otherwise than by a
        step. Collective.
        """
        follow([memory for memory in self._memories if not memory.frees])

    def close(self) -> None:
        """Follow no more steps, as the run is over."""
        with _REGISTRY:
            for known in (
                torch_optimizer._global_optimizer_pre_hooks,
                torch_optimizer._global_optimizer_post_hooks,
            ):
                for announcer in [
                    hook for hook in known.values() if isinstance(hook, StepAnnouncer)
                ]:
                    announcer.leave_out(self)


def follow(memories: Sequence[FlatMemory]) -> None:
    """Gather whole parameters; all of them travel at once."""
    for memory, work in [(memory, memory.begin_gather()) for memory in memories]:
        memory.end_gather(work)


class StepAnnouncer:
    """A hook of all optimizers of this process, which tells those `ShardSteps` that live of a step,
    before or after it.

    It stays when they are over: torch fails where its list of hooks changes while another thread's
    step goes through it.
    """

    def __init__(self, when: Callable[[ShardSteps, Optimizer], None]) -> None:
        self._when = when
        self._steps: tuple[weakref.ref[ShardSteps], ...] = ()

    def __call__(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for ref in self._steps:
            if (steps := ref()) is not None:
                self._when(steps, optimizer)

    def add(self, steps: ShardSteps) -> None:
        """Tell `steps` too, as long as it lives."""
        self._steps = (*(ref for ref in self._steps if ref() is not None), weakref.ref(steps))

    def leave_out(self, steps: ShardSteps) -> None:
        """Tell `steps` no more."""
        self._steps = tuple(ref for ref in self._steps if ref() not in (None, steps))


def _announce_to(steps: ShardSteps) -> None:
    """Tell `steps` of all steps; torch's hooks are there once, as threads may step while others
    begin.
    """
    with _REGISTRY:
        for known, register, when in (
            (
                torch_optimizer._global_optimizer_pre_hooks,
                register_optimizer_step_pre_hook,
                ShardSteps.before,
            ),
            (
                torch_optimizer._global_optimizer_post_hooks,
                register_optimizer_step_post_hook,
                ShardSteps.after,
            ),
        ):
            announcer = next(
                (hook for hook in known.values() if isinstance(hook, StepAnnouncer)), None
            )
            if announcer is None:
                announcer = StepAnnouncer(when)
                register(announcer)
            announcer.add(steps)
