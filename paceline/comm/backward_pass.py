"""The backward pass that runs in this thread: private parts of torch's autograd, in one place.

FSDP of torch uses the same functions, so they are unlikely to go without a word. Without them no
one could tell where a pass ends, and gradients would never be exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import Variable

# Number of the pass that runs in this thread; -1 outside of a pass. It is torch's own function, as
# a function around it would be one more call in each step.
current_pass_id: Final[Callable[[], int]] = torch._C._current_graph_task_id
# Node of the graph that runs in this thread; None outside of one.
current_node: Final[Callable[[], Any]] = torch._C._current_autograd_node


def is_inside_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return current_pass_id() != -1


def call_at_end_of_backward(act: Callable[[], None]) -> None:
    """Call `act` in this thread at the end of its backward pass, after earlier callbacks.

    torch raises if no pass runs in this thread.
    """
    Variable._execution_engine.queue_callback(act)


def will_execute(node: Any) -> bool:
    """Whether the pass under way executes this node of the graph."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # the node is the end of the pass, as in torch.autograd.grad
        return False
