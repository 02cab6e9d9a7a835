"""Keeps torch's compiler away from the backend, whose methods C++ calls in compiled code."""

from __future__ import annotations

from typing import TypeVar

import torch

C = TypeVar("C", bound=type)


def mark_uncompiled(group: C) -> C:
    """Make the methods of a class, and all their callees, run uncompiled under `torch.compile`.

    `torch.compiler.disable` would do the same, but it imports the compiler, which takes a second.
    Here a mark is set on the code of each function. The mark is private to torch's compiler
    (`set_code_exec_strategy`): if it changes, DDP can't be compiled on this backend.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for base in group.__mro__:
        for member in vars(base).values() if base.__module__.startswith("paceline.") else ():
            code = getattr(getattr(member, "fget", member), "__code__", None)
            if code is not None:
                frames.set_code_exec_strategy(code, skip)
    return group
