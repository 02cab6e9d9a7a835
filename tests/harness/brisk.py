"""Imported first by the tests and by the scripts of jobs under test, whose processes then start and
end in half the time.

Of the 2.6 s of processor time that a worker takes which trains hardly anything, one goes into
importing torch's compiler: optimizers load `torch._dynamo` only to tell it to leave them alone.
Until a script asks that module for anything more, one that does nothing stands in for it here; then
the real one is loaded. Another 0.3 s go into looking for garbage in what `import torch` makes, and
0.3 s into telling torch what its operators give for tensors without values (device="meta"), which
no script here has.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
import threading
import typing
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

gc.disable()
LATER = "torch._meta_registrations", "torch.distributed._meta_registrations"
left_out = [name for name in LATER if "torch" not in sys.modules]
for name in left_out:
    sys.modules[name] = ModuleType(name)
# before the stand-in is there: it loads a part of torch._dynamo and lets go of it
import torch  # noqa: E402

# what they do besides in newer versions of torch: generators need it
if left_out and hasattr(torch._C, "_set_generator_metaclass"):
    from torch._opaque_base import OpaqueBaseMeta

    torch._C._set_generator_metaclass(OpaqueBaseMeta)
for name in left_out:
    del sys.modules[name]

for devices in (torch.cuda, torch.xpu, torch.mtia):
    # each seed would be kept for them, with the stack of its caller as text: a millisecond
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None

_READING = threading.Lock()
# no child finds it taken
os.register_at_fork(
    before=_READING.acquire, after_in_parent=_READING.release, after_in_child=_READING.release
)


@functools.wraps(torch.get_rng_state)
def _get_rng_state(read: Callable[[], torch.Tensor] = torch.get_rng_state) -> torch.Tensor:
    """Read the state of torch's generator while nobody looks for garbage.

    Torch holds a lock of the generator as it makes the tensor, which may be when Python looks for
    garbage; and where that calls Python code (finalizers, `gc.callbacks`) another thread may come
    on, that wants the generator and waits for it without letting anybody else on.
    """
    with _READING:
        looks = gc.isenabled()
        gc.disable()
        try:
            return read()
        finally:
            if looks:
                gc.enable()


if sys.version_info < (3, 12):
    # later versions look for garbage between two instructions alone
    torch.get_rng_state = torch.random.get_rng_state = _get_rng_state
    # from then on it remembers: what a protocol asks for would be looked up for each object it is
    # asked of
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)

gc.freeze()
gc.enable()

NAME = "torch._dynamo"


class _Utils:
    """What DistributedDataParallel asks: how its buckets would be compiled."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        return "ddp_optimizer"  # the default

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{NAME}.utils"), name)


class _Config:
    """What `torch.utils.checkpoint` asks: the default."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{NAME}.config"), name)


class _StandIn(ModuleType):
    """What torch asks of its compiler where nothing is compiled."""

    utils, config = _Utils(), _Config()
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        return fn if fn is not None else lambda fn: fn

    @staticmethod
    def graph_break(*_: Any) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` asks all modules for theirs, in the middle of other imports
        if name == "__file__":
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            importlib.import_module(LATER[0])
        return getattr(importlib.import_module(NAME), name)


if NAME not in sys.modules:
    sys.modules[NAME] = _StandIn(NAME)
