"""The parts of a process group that torch.distributed asks for, besides its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend.issue import GroupMembers, Issuer
from paceline.comm.backend.recurring import RecurringMemory
from paceline.comm.backend.work import BackendWork, Completer, JoinedWork
from paceline.comm.group_protocol import FinishedWork, Group, Work
from paceline.errors import UsageError

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import ProcessGroup, Store
else:
    from torch.distributed import ProcessGroup, Store

Call = Callable[[Group], Work[Any]]
Finish = Callable[[Any], Any]


class BackendBase(ProcessGroup):
    """A process group of torch.distributed, without its operations.

    Operations begin in the order of calls (`Issuer`). They end in the thread that waits for them,
    or in the background (`Completer`).

    Args:
        rank: Rank of this process in the group.
        ranks: Rank of each member among all workers, for errors.
        meet: Makes the group. Called once, at the first operation.
        store: Store of torch that this group was made with.
        pairs: A process group of Gloo of the same ranks, for messages between two of them.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        meet: Callable[[], GroupMembers],
        store: Store,
        *,
        pairs: Any,
    ) -> None:
        # The only constructor that subclasses in Python can call.
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._rank, self._size, self._ranks = rank, len(ranks), tuple(ranks)
        self._pairs, self._store = pairs, store
        self._timeout: timedelta | None = None  # replaces the deadline of the group
        self._issuer = Issuer(meet, self._ranks)
        self._completer = Completer(self._issuer.is_crowded)
        # Messages have a completer of their own: a message must not be held up by a collective,
        # as other ranks may need it before they come to that collective.
        self._message_completer = Completer()
        self._recurring = RecurringMemory()
        self._sequence = 0
        self._coalesced: list[BackendWork] | None = None  # a list while torch coalesces
        self._named = self._described = ""

    # ---- names that torch asks for

    def getBackendName(self) -> str:
        """Return the name of this backend."""
        return "paceline"

    def name(self) -> str:
        """Return the name of this backend."""
        return "paceline"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name by which torch finds this group again."""
        # Private to torch: the table that it fills when it makes a group, in case it does not call
        # `_set_group_name`.
        return self._named or dist.distributed_c10d._world.pg_names[self]

    def _set_group_name(self, name: str) -> None:
        self._named = name

    @property
    def group_desc(self) -> str:
        """Purpose of this group, in words that torch was given."""
        return self._described

    def _set_group_desc(self, text: str) -> None:
        self._described = text

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> BackendBase:  # type: ignore[override]
        if torch.device(device).type != "cpu":
            raise UsageError(
                f"the backend paceline moves tensors in the processor's memory, not on {device}; "
                "use x.cpu() or another backend"
            )
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def get_group_store(self) -> Store:
        """Return the store that this group was made with."""
        return self._store

    # ---- deadlines and the end

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later operations may take."""
        self._timeout = timeout

    def abort(self) -> None:
        """End all operations under way with an error, on all ranks."""
        self._end_group(lambda group: group.abort())

    def shutdown(self) -> None:
        """Leave the group in good order."""
        self._end_group(lambda group: group.close())

    def _end_group(self, act: Callable[[Group], None]) -> None:
        self._issuer.end_operations(act)
        self._completer.close()
        self._message_completer.close()

    # ---- operations

    def _begin_operation(
        self, call: Call, finish: Finish | None, opts: Any, outputs: Any
    ) -> BackendWork:
        """Begin `call` on the group, after all earlier operations.

        Args:
            call: Begins the operation on a `Group`.
            finish: Gets the result of `call`, and puts it where the caller wants it. Default: none.
            opts: Options of torch; `timeout` and `asyncOp` count here.
            outputs: Tensors that the operation fills, as torch's Work gives them.
        """
        self._sequence += 1
        return self._wrap_work(self._issuer.begin_call(call), finish, opts, outputs)

    def _wrap_work(
        self, work: Work[Any], finish: Finish | None, opts: Any, outputs: Any
    ) -> BackendWork:
        """Wrap a Work of a group as a Work of torch, which ends even if no caller waits for it."""
        begun = self._make_work(work, finish, opts, outputs, self._completer)
        if self._coalesced is not None:
            self._coalesced.append(begun)
        elif getattr(opts, "asyncOp", True):  # else torch waits for it right away
            self._completer.add_work(begun)
        return begun

    def _wrap_message(self, work: Work[Any], outputs: Any) -> BackendWork:
        """Wrap a message between two ranks as a Work of torch. Gloo's own threads advance it."""
        begun = self._make_work(work, None, None, outputs, self._message_completer)
        if self._coalesced is not None:
            self._coalesced.append(begun)
        return begun

    def _join_works(
        self, works: list[BackendWork], opts: Any, outputs: Any, finish: Finish | None = None
    ) -> BackendWork:
        """Make one Work of several."""
        messages = any(work.completer is self._message_completer for work in works)
        completer = self._message_completer if messages else self._completer
        return self._make_work(
            JoinedWork(works) if works else FinishedWork(), finish, opts, outputs, completer
        )

    def _make_work(
        self, work: Work[Any], finish: Finish | None, opts: Any, outputs: Any, completer: Completer
    ) -> BackendWork:
        return BackendWork(
            work,
            finish,
            outputs,
            self._timeout_seconds(opts),
            completer=completer,
            locate=self._issuer.add_hosts,
        )

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> BackendWork:
        works, self._coalesced = self._coalesced or [], None
        # Only now may they be completed in the background: all of them have begun.
        for work in works:
            if work.completer is self._completer:
                work.completer.add_work(work)
        return self._join_works(works, None, [])

    def _timeout_seconds(self, opts: Any) -> float | None:
        """Seconds that an operation may take: from its options, or from `set_timeout`.

        None is the deadline of the group, after which an error names the missing ranks.
        """
        timeout = getattr(opts, "timeout", None)
        own = timeout if timeout is not None and timeout.total_seconds() > 0 else self._timeout
        return None if own is None else own.total_seconds()


def only_tensor(tensors: Any, what: str) -> Any:
    """Return the only tensor of a list, or the tensor itself.

    Torch passes lists, from the time when one process had several GPUs; some callers don't.
    """
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(
            f"{what}: {len(tensors)} tensors, and the backend paceline takes one on each rank"
        )
    return tensors[0]


def root_rank(opts: Any) -> int:
    """Return the root rank of an operation: from torch's options, or `opts` itself, or rank 0."""
    return int(getattr(opts, "rootRank", 0 if opts is None else opts))
