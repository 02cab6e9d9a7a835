"""The default process group of torch.distributed, for libraries that ask it for rank and size.

torchmetrics is one of them.

    open     unless the script has one: our backend, or Gloo and NCCL if the run has that, on the
             store and the interface of the job
    use      by code that asks torch.distributed; workers meet then, not before, so a start takes
             a millisecond and waits for no other worker
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

# Variables that torch reads when it makes a group. It has no arguments for them.
INTERFACE, LAZY = "GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"
_FAREWELL = 0.5  # seconds that a group may take to end after a failure
_TWICE = (
    "pl.start has made the default process group of torch.distributed: "
    "use that, or make yours before pl.start, which keeps it then"
)


class DefaultProcessGroup:
    """The default process group of `size` workers, unless the script has made one.

    Args:
        store: Store of torch for the group.
        rank: Rank of this worker.
        size: Number of workers.
        address: Address of this worker, whose interface Gloo uses.
        deadline: Seconds that a wait may take.
        backend: Name of the backend in torch.distributed.
        options: Options of that backend. Default: none.

    Raises:
        PlaceError: The environment names an interface that isn't there.
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
        self._set_variables: dict[
            str, str
        ] = {}  # variables that this object has put into the environment
        self._group: dist.ProcessGroup | None = None
        self.why = ""  # why there is no default group at all
        if dist.is_initialized():
            return
        carrier = os.environ.get(INTERFACE) or network.find_interface_name(address)
        if carrier is None:
            self.why = (
                f"the network interface of {address} is unknown, so torch.distributed has no "
                f"default process group: set {INTERFACE}"
            )
            return
        # It stays until the end: groups that a script makes later listen on the same interface.
        if INTERFACE not in os.environ:
            self._set_variables[INTERFACE] = os.environ[INTERFACE] = carrier
        hook = sys.excepthook
        timeout = timedelta(seconds=max(3.0, deadline))
        try:
            # An interface that isn't there raises here, not at the first message.
            dist.ProcessGroupGloo.create_device(interface=carrier, lazy_init=True)
            with _environment_set(LAZY, "1"):
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
                f"{network.format_interface_advice()}"
            ) from error
        sys.excepthook = hook  # the hook of torch repeats the rank before each line
        self._group = dist.group.WORLD
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _drop_in_child(me()))

    @property
    def is_ours(self) -> bool:
        """Whether the default group is the one that was made here."""
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def drop_in_child(self) -> None:
        """Drop the default group in a forked child, such as a reader of a DataLoader.

        Connections belong to the parent, and its threads do not run in the child.
        """
        if self.is_ours:
            dist.GroupMember.WORLD = None

    def explain_error(self, error: BaseException | None) -> None:
        """Add a note to an error of torch if the script has made a second default group."""
        trace = None if error is None else error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if (
            error is not None
            and trace is not None
            and self.is_ours
            and trace.tb_frame.f_code is _init_code()
        ):
            error.add_note(f"paceline: {_TWICE}")

    def close(self, *, failed: bool) -> None:
        """End the group with the run. May be called twice.

        `failed`: whether the run has failed; pending operations are then not waited for.
        """
        if self.is_ours:
            if failed:
                end = threading.Thread(
                    target=dist.destroy_process_group, name="paceline reaper", daemon=True
                )
                end.start()
                end.join(_FAREWELL)
            else:
                dist.destroy_process_group()
        self._group = None
        for name, value in self._set_variables.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self._set_variables.clear()


def _drop_in_child(world: DefaultProcessGroup | None) -> None:
    if world is not None:
        world.drop_in_child()


def _init_code() -> CodeType:
    # Below its decorators: the function that raises when there is a group already.
    function = dist.init_process_group
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__


@contextlib.contextmanager
def _environment_set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
