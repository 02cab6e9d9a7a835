"""Checks that a backward pass comes in the turn of its forward.

Each batch has its own weight on each worker, and a backward pass has only one.

turn 0   a = model(x)        the graph of a remembers turn 0
turn 1   b = model(x)        (loss(a) + loss(b)).backward() reaches it with the weight of turn 1:
                             refused, unless both weights are the same

torch.autograd.grad(a.sum(), x) and the like reach no p.grad. They stay local to a worker, and
right.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Final

import torch
from torch import Tensor, nn

from paceline.comm.backward_pass import will_execute
from paceline.data.loader import Turn
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.parallel.containers import tree_leaves

# what our hooks are pickled as: it returns None whatever it is given, and models load where there
# is no paceline
UNPICKLED_AS_NONE: Final = (functools.partial, (contextlib.nullcontext.__exit__, None))


class ForwardTurnHook:
    """A forward hook that lets the graph remember its turn.

    In a copied or unpickled model it does nothing.
    """

    def __init__(self, loop: TrainingLoop | None = None) -> None:
        self._loop = loop

    def __call__(self, _: nn.Module, __: Any, out: Any) -> None:
        if torch.compiler.is_compiling() or self._loop is None or not torch.is_grad_enabled():
            return
        loop, turn = self._loop, self._loop.training_turn
        if turn is None or not turn.train or loop.apart or loop.backward.sync.replicas_diverge:
            return

        def reached(_: Any) -> None:
            if loop.training_turn is not turn:
                _check_weights_equal(loop, turn)

        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(reached)

    def belongs_to(self, loop: TrainingLoop) -> bool:
        """Whether this hook remembers turns of `loop`."""
        return self._loop is loop

    def __deepcopy__(self, memo: object) -> ForwardTurnHook:
        return ForwardTurnHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return UNPICKLED_AS_NONE


def remember_turns(model: nn.Module, loop: TrainingLoop) -> None:
    """Let the outputs of this model remember their turn until the run ends.

    Calling it twice is harmless.
    """
    if not any(
        isinstance(hook, ForwardTurnHook) and hook.belongs_to(loop)
        for hook in model._forward_hooks.values()
    ):
        loop.undos.append(nn.Module.register_forward_hook(model, ForwardTurnHook(loop)).remove)


def _check_weights_equal(loop: TrainingLoop, then: Turn) -> None:
    """Raise `UsageError` if the turn `then` had another weight than the present one."""
    now = loop.training_turn
    scale = 1.0 / loop.context.group.size if now is None else now.scale
    if not math.isclose(scale, then.scale, rel_tol=1e-9) and any(
        will_execute(watched.node) for watched in loop.backward.watched.parameters
    ):
        where = (
            "after the loop over the loader" if now is None else f"in the turn of batch {now.index}"
        )
        raise UsageError(
            f"a backward {where} reaches what the model gave for batch {then.index} of its epoch, "
            "and this worker's part of that batch "
            f"({then.scale:.3g}) is not its part now ({scale:.3g}), so one loss of several batches "
            "can't be weighted. Call backward in the "
            "turn of each batch: (loss / k).backward() adds up gradients, and run.no_sync() saves "
            "their exchanges"
        )
