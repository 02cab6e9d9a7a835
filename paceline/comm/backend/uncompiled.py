"""Keeps torch's compiler away from the backend: C++ calls our methods while compiled code runs,
and each call is offered to it.
"""

from __future__ import annotations

from typing import TypeVar

import torch

C = TypeVar("C", bound=type)


def uncompiled(group: C) -> C:
    """Have the methods of a class, and all that they call, run as they are under `torch.compile`.

    `torch.compiler.disable` would do the same for a second of import: it loads the compiler, in
    which this is a mark on the code of a function. Without `set_code_exec_strategy`, which is
    private, DDP can't be compiled on the backend.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for base in group.__mro__:
        for member in vars(base).values() if base.__module__.startswith("paceline.") else ():
            code = getattr(getattr(member, "fget", member), "__code__", None)
            if code is not None:
                frames.set_code_exec_strategy(code, skip)
    return group
