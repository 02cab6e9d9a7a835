"""The default process group of torch.distributed, for libraries that ask it for rank and size
(torchmetrics and others).

open     where the script has none: this package's backend, or Gloo beside NCCL where the run has
         that; on the job's store and interface
used     by code that asks torch.distributed. Workers meet then, not before: a start costs a
         millisecond, and doesn't wait
close    at the end of the run, with all groups that were made of it
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.cluster import network
from paceline.errors import PlaceError

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

# what torch reads when a group is made; it takes no argument for them
INTERFACE, LAZY = "GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"
_FAREWELL = 0.5  # seconds that a group may take to end after a failure
_TWICE = (
    "pl.start has made the default process group of torch.distributed: "
    "use that, or make yours before pl.start, which keeps it then"
)


class DefaultProcessGroup:
    """The default process group of `size` workers, unless the script has made one.

    `backend`: what torch.distributed knows it by, with its `options`.

    Raises `PlaceError` where the interface that the environment names isn't there.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        size: int,
        *,
        address: str,
        deadline: float,
        backend: str,
        options: Any = None,
    ) -> None:
        self._set: dict[str, str] = {}  # in the environment, by us
        self._group: dist.ProcessGroup | None = None
        self.why = ""  # there is none at all
        if dist.is_initialized():
            return
        carrier = os.environ.get(INTERFACE) or network.carrier(address)
        if carrier is None:
            self.why = (
                f"the interface of {address} can't be told, so torch.distributed has no default "
                f"process group: set {INTERFACE}"
            )
            return
        # stays until the end: groups that a script makes of this one listen there, too
        if INTERFACE not in os.environ:
            self._set[INTERFACE] = os.environ[INTERFACE] = carrier
        hook = sys.excepthook
        timeout = timedelta(seconds=max(3.0, deadline))
        try:
            # raises now, not at the first message
            dist.ProcessGroupGloo.create_device(interface=carrier, lazy_init=True)
            with _setting(LAZY, "1"):
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=timeout,
                    pg_options=options,
                )
        except RuntimeError as error:
            text = (
                f"torch.distributed can't listen on {INTERFACE}={carrier} "
                f"({str(error).splitlines()[0]})"
            )
            raise PlaceError(
                f"{text}: leave that variable out, or name an interface of this machine in it; "
                f"{network.advice()}"
            ) from error
        sys.excepthook = hook  # torch's own repeats the rank before each line
        self._group = dist.group.WORLD
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(me()))

    @property
    def here(self) -> bool:
        """Whether the default group is ours."""
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def forget(self) -> None:
        """Drop the default group in a child (a reader of a DataLoader): connections are the
        parent's, and threads are not here.
        """
        if self.here:
            dist.GroupMember.WORLD = None

    def explain(self, error: BaseException | None) -> None:
        """Add to an error of torch's that the script asked for a default group where ours is one
        already.
        """
        trace = None if error is None else error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if (
            error is not None
            and trace is not None
            and self.here
            and trace.tb_frame.f_code is _code()
        ):
            error.add_note(f"paceline: {_TWICE}")

    def close(self, *, failed: bool) -> None:
        """End the group with the run.

        Where the run has failed, pending operations are not waited for. Calling it twice is
        harmless.
        """
        if self.here:
            if failed:
                end = threading.Thread(
                    target=dist.destroy_process_group, name="paceline reaper", daemon=True
                )
                end.start()
                end.join(_FAREWELL)
            else:
                dist.destroy_process_group()
        self._group = None
        for name, value in self._set.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self._set.clear()


def _forget(world: DefaultProcessGroup | None) -> None:
    if world is not None:
        world.forget()


def _code() -> CodeType:
    made = dist.init_process_group
    while hasattr(made, "__wrapped__"):
        made = made.__wrapped__
    return made.__code__


@contextlib.contextmanager
def _setting(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
