"""What torch.distributed asks of every process group, and how an operation begins: on the group
that ranks make when they first meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend.issue import Issuer, Members
from paceline.comm.backend.recurring import RecurringMemory
from paceline.comm.backend.work import BackendWork, Completer, JoinedWork
from paceline.comm.group import Finished, Group, Work
from paceline.errors import UsageError

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import ProcessGroup, Store
else:
    from torch.distributed import ProcessGroup, Store

Call = Callable[[Group], Work[Any]]
Finish = Callable[[Any], Any]


class BackendBase(ProcessGroup):
    """A process group of torch.distributed without its operations.

    `ranks`: what its members are called among all workers. `meet` makes its group, when they first
    exchange something. `pairs`: what sends and receives between two ranks, a group of Gloo.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        meet: Callable[[], Members],
        store: Store,
        *,
        pairs: Any,
    ) -> None:
        # the one that can be subclassed
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._rank, self._size, self._ranks = rank, len(ranks), tuple(ranks)
        self._pairs, self._store = pairs, store
        self._timeout: timedelta | None = None  # other than that of the group
        self._issuer = Issuer(meet, self._ranks)
        self._completer = Completer(self._issuer.crowded)
        self._message_completer = Completer()  # apart, as what is sent may depend on anything
        self._recurring = RecurringMemory()
        self._sequence = 0
        self._coalesced: list[BackendWork] | None = None
        self._named = self._described = ""

    # ---- names

    def getBackendName(self) -> str:
        """Return the name of this backend."""
        return "paceline"

    def name(self) -> str:
        """Return the name of this backend."""
        return "paceline"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name by which torch finds this group again."""
        return self._named or dist.distributed_c10d._world.pg_names[self]

    def _set_group_name(self, name: str) -> None:
        self._named = name

    @property
    def group_desc(self) -> str:
        """The purpose of this group, as torch was told."""
        return self._described

    def _set_group_desc(self, text: str) -> None:
        self._described = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> BackendBase:  # type: ignore[override]
        if torch.device(device).type != "cpu":
            raise UsageError(
                "the backend paceline moves tensors in the processor's memory, and was asked for "
                f"one on {device}"
            )
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_group_store(self) -> Store:
        """Return the store that this group was made with."""
        return self._store

    # ---- time, and ends

    def set_timeout(self, timeout: timedelta) -> None:
        """Give later operations another time to wait."""
        self._timeout = timeout

    def abort(self) -> None:
        """End all that is under way with an error, on all ranks."""
        self._end(lambda group: group.abort())

    def shutdown(self) -> None:
        """Leave in good order."""
        self._end(lambda group: group.close())

    def _end(self, act: Callable[[Group], None]) -> None:
        self._issuer.end(act)
        self._completer.close()
        self._message_completer.close()

    # ---- operations

    def _begin(self, call: Call, finish: Finish | None, opts: Any, outputs: Any) -> BackendWork:
        """Begin `call` on the group, after all that was begun before.

        `finish` takes its result to where the caller wants it.
        """
        self._sequence += 1
        return self._follow(self._issuer.begin(call), finish, opts, outputs)

    def _follow(
        self, work: Work[Any], finish: Finish | None, opts: Any, outputs: Any
    ) -> BackendWork:
        """Make a work of torch's of one of ours, which goes on even where nobody waits for it."""
        begun = self._work(work, finish, opts, outputs, self._completer)
        if self._coalesced is not None:
            self._coalesced.append(begun)
        elif getattr(opts, "asyncOp", True):  # else torch waits for it right away
            self._completer.add(begun)
        return begun

    def _message(self, work: Work[Any], outputs: Any) -> BackendWork:
        """Make a work of torch's of a message, which Gloo's threads carry."""
        begun = self._work(work, None, None, outputs, self._message_completer)
        if self._coalesced is not None:
            self._coalesced.append(begun)
        return begun

    def _join(
        self, works: list[BackendWork], opts: Any, outputs: Any, finish: Finish | None = None
    ) -> BackendWork:
        """Make one work of several."""
        messages = any(work.completer is self._message_completer for work in works)
        completer = self._message_completer if messages else self._completer
        return self._work(
            JoinedWork(works) if works else Finished(), finish, opts, outputs, completer
        )

    def _work(
        self, work: Work[Any], finish: Finish | None, opts: Any, outputs: Any, completer: Completer
    ) -> BackendWork:
        return BackendWork(
            work,
            finish,
            outputs,
            self._seconds(opts),
            completer=completer,
            locate=self._issuer.locate,
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> BackendWork:
        works, self._coalesced = self._coalesced or [], None
        for work in works:
            if work.completer is self._completer:
                work.completer.add(work)
        return self._join(works, None, [])

    def _seconds(self, opts: Any) -> float | None:
        """Return how long an operation may take; None: the deadline that the group was made
        with, after which it names who is missing.
        """
        timeout = getattr(opts, "timeout", None)
        own = timeout if timeout is not None and timeout.total_seconds() > 0 else self._timeout
        return None if own is None else own.total_seconds()


def one(tensors: Any, what: str) -> Any:
    """Return the one of `tensors`: torch gives a list, from when a process had several GPUs;
    some callers give the tensor itself.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(
            f"{what}: {len(tensors)} tensors, and the backend paceline takes one on each rank"
        )
    return tensors[0]


def root_of(opts: Any) -> int:
    """Return the rank that an operation begins or ends at: that of torch's options, or the
    options themselves; the first without any.
    """
    return int(getattr(opts, "rootRank", 0 if opts is None else opts))
