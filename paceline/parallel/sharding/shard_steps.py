"""What happens around steps of optimizers on pieces: whole parameters are gathered after each."""

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
from paceline.parallel.sharding.flat_memory import FlatMemory

# Guards the announcers among torch's global hooks.
_REGISTRY: Final = threading.Lock()


class ShardSteps:
    """Gathers whole parameters after each step of an optimizer that has pieces of them.

    So whatever reads them finds the new values. A step of the whole parameters themselves is
    refused: they have no gradients, and it would do nothing.
    """

    def __init__(self, memories: Sequence[FlatMemory]) -> None:
        self._memories = [memory for memory in memories if memory.is_trained]
        self._wholes = {
            id(whole): one.name
            for memory in self._memories
            if not memory.frees
            for one, whole in zip(memory.parameters, memory.wholes, strict=True)
        }
        # By optimizer: its number of parameters when it was looked at, and the memories of its
        # pieces.
        self._stepped = weakref.WeakKeyDictionary[Optimizer, tuple[int, list[FlatMemory]]]()
        _register_listener(self)

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` for an optimizer that can't step this worker's pieces."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        # Look at the optimizer again if it was given more parameters since.
        seen_count, memories = self._stepped.get(optimizer, (-1, []))
        if seen_count != count:
            memories = self._find_memories(optimizer)
            self._stepped[optimizer] = count, memories
        for memory in memories:
            memory.check_memory()
            memory.check_gradients()

    def _find_memories(self, optimizer: Optimizer) -> list[FlatMemory]:
        """Find the memories that an optimizer has pieces of."""
        ids = {
            id(parameter): True for group in optimizer.param_groups for parameter in group["params"]
        }
        name = next((self._wholes[key] for key in ids if key in self._wholes), None)
        if name is not None:
            raise UsageError(
                f"a {type(optimizer).__qualname__} has the whole parameter {name}, and each worker "
                "steps a piece of it; make the optimizer before "
                "run.prepare, and give it to the call that cuts the model"
            )
        memories = [
            memory for memory in self._memories if any(id(piece) in ids for piece in memory.pieces)
        ]
        if memories:
            check_elementwise(optimizer, memories[0].parameters[0].name)
        return memories

    def gather_stepped(self, optimizer: Optimizer) -> None:
        """Gather the whole parameters whose pieces an optimizer has stepped. Collective."""
        _, memories = self._stepped.get(optimizer, (0, []))
        gather_memories([memory for memory in memories if not memory.frees])

    def gather_all(self) -> None:
        """Gather all whole parameters, as pieces have changed without a step. Collective."""
        gather_memories([memory for memory in self._memories if not memory.frees])

    def close(self) -> None:
        """Follow no more steps, as the run has ended."""
        # Private to torch: the dicts of global hooks, by handle. If they are renamed, this raises.
        with _REGISTRY:
            for hooks in (
                torch_optimizer._global_optimizer_pre_hooks,
                torch_optimizer._global_optimizer_post_hooks,
            ):
                for announcer in [
                    hook for hook in hooks.values() if isinstance(hook, StepAnnouncer)
                ]:
                    announcer.remove_listener(self)


def gather_memories(memories: Sequence[FlatMemory]) -> None:
    """Gather whole parameters; all of them travel at once."""
    for memory, work in [(memory, memory.begin_gather()) for memory in memories]:
        memory.end_gather(work)


class StepAnnouncer:
    """A hook on all optimizers of this process. It tells every live `ShardSteps` of each step.

    It stays registered when they are gone. torch would fail if its dict of hooks changed while
    another thread's step goes through it.
    """

    def __init__(self, when: Callable[[ShardSteps, Optimizer], None]) -> None:
        self._when = when
        self._steps: tuple[weakref.ref[ShardSteps], ...] = ()

    def __call__(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        for ref in self._steps:
            if (steps := ref()) is not None:
                self._when(steps, optimizer)

    def add_listener(self, steps: ShardSteps) -> None:
        """Tell `steps` of steps, too, as long as it is alive."""
        self._steps = (*(ref for ref in self._steps if ref() is not None), weakref.ref(steps))

    def remove_listener(self, steps: ShardSteps) -> None:
        """Tell `steps` no more."""
        self._steps = tuple(ref for ref in self._steps if ref() not in (None, steps))


def _register_listener(steps: ShardSteps) -> None:
    """Tell `steps` of all steps from now on; register the announcers the first time."""
    with _REGISTRY:
        for hooks, register, when in (
            (
                torch_optimizer._global_optimizer_pre_hooks,
                register_optimizer_step_pre_hook,
                ShardSteps.check_step,
            ),
            (
                torch_optimizer._global_optimizer_post_hooks,
                register_optimizer_step_post_hook,
                ShardSteps.gather_stepped,
            ),
        ):
            announcer = next(
                (hook for hook in hooks.values() if isinstance(hook, StepAnnouncer)), None
            )
            if announcer is None:
                announcer = StepAnnouncer(when)
                register(announcer)
            announcer.add_listener(steps)
