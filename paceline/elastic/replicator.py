"""Sends replicas to their keepers while training goes on: a thread of each worker, and a group of
its own.

    rank 0   label ─┐          ┌─ label of rank 2   bytes to rank 2 ──────>   all whole? ─┐
    rank 1   none  ─┼─ agree ──┤                                                         ├─ agree
    rank 2   label ─┘          └─ label of rank 0   bytes to rank 0 ──────>   all whole? ─┘

All workers send at the same steps. Of a copy that breaks off half-way nothing is kept, unless all
of it had come: its last bytes show that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from paceline.at_exit import at_exit
from paceline.comm.collectives import UncheckedExchange
from paceline.comm.group_protocol import Group, Traffic
from paceline.elastic.replicate import FORM, CopyLabel, CopyShelf, keepers, wrap
from paceline.errors import LOSSES, PacelineError
from paceline.timings import DEFAULTS, RecoveryTimings
from paceline.trace import Trace

TICK = 0.1  # seconds after which a wait looks up
SLOWEST = 1e6  # bytes a second, below which a copy counts as stuck


class _Transfer:
    """One worker's part in a transfer: its state (None: nothing) as of a step."""

    def __init__(self, state: Any, step: int) -> None:
        self.state, self.step = state, step
        self.ended = threading.Event()


class Replicator:
    """Sends copies over `group`, which it takes charge of.

    `hosts` and `names` are those of its ranks; copies that come go to `shelf`.
    """

    # seconds that training has waited for others here: what it waits for is said in `wait`
    waited = 0.0

    def __init__(
        self,
        group: Group,
        hosts: Sequence[int],
        names: Sequence[int],
        shelf: CopyShelf,
        *,
        trace: Trace | None = None,
        timings: RecoveryTimings = DEFAULTS.recovery,
    ) -> None:
        self._patience = timings.copy
        self._group, self._hosts, self._names, self._shelf = (
            group,
            tuple(hosts),
            tuple(names),
            shelf,
        )
        self._trace = Trace(0) if trace is None else trace
        self.traffic = Traffic()  # as of the last start
        self.broken: PacelineError | None = None
        self.owners: frozenset[int] = frozenset()  # owners at the last transfer, by name
        self.whole = 0  # the last step as of which all copies have come
        self.nbytes = 0  # of the last copy that this worker has sent
        self.seconds: deque[float] = deque(maxlen=5)  # that the last copies were on their way
        # on copies that were refused, on all workers
        self.remarks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._job: _Transfer | None = None
        self._jobs: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline courier", daemon=True)
        self._thread.start()
        # a thread that is inside torch while Python ends takes the process down with it
        self._unregister = at_exit(self.close)

    # ---- the worker's calls

    @property
    def idle(self) -> bool:
        """Whether no copy is on its way."""
        return self._job is None or self._job.ended.is_set()

    @property
    def works(self) -> bool:
        """Whether copies can be sent."""
        return self.broken is None and self._thread.is_alive()

    def start(self, state: Any, step: int) -> None:
        """Send this worker's state, or None for nothing.

        Its tensors must stay as they are until the transfer has ended.
        """
        assert self.idle
        self.traffic = self._group.traffic + Traffic()
        self._job = _Transfer(state, step)
        self._jobs.put(self._job)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the transfer under way (at most so long); whether it has ended, well or not."""
        end = None if seconds is None else time.monotonic() + seconds
        while not self.idle and self._thread.is_alive() and (end is None or time.monotonic() < end):
            assert self._job is not None
            self._job.ended.wait(TICK)
        return self.idle or not self._thread.is_alive()

    def halt(self) -> None:
        """Stop for a change of the members: let arrive what can still arrive, and send no more."""
        if not self.wait(self._patience):
            self.abort()
            self.wait(self._patience)

    def close(self) -> None:
        """End the thread and the group. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._unregister()
        self._jobs.put(None)
        self._thread.join(self._patience if self.works else TICK)
        self._group.close()
        self._thread.join(TICK)

    def abort(self) -> None:
        """End the transfer under way, at once and without the others."""
        self._group.abort()

    # ---- the thread

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            try:
                if self.broken is None:
                    with self._trace.span(f"copy of step {job.step}", "buddies"):
                        self._carry(job)
            except LOSSES as error:
                self.broken = error
            except PacelineError as error:
                self.broken = error
                self.abort()  # so that no worker waits for this one
            finally:
                job.ended.set()

    def _carry(self, job: _Transfer) -> None:
        label, pieces = (None, []) if job.state is None else wrap(job.state, job.step)
        heads = [
            msgpack.unpackb(head)
            for head in self._group.gather_bytes(
                msgpack.packb([FORM, None if label is None else label.dump()])
            )
        ]
        began, me = time.perf_counter(), self._group.rank
        owners = {
            rank: self._hosts[rank] for rank, (_, head) in enumerate(heads) if head is not None
        }
        self.owners = frozenset(self._names[rank] for rank in owners)
        pairs = keepers(owners)
        odd = [owner for owner, keeper in pairs.items() if heads[owner][0] != heads[keeper][0]]
        labels = {
            owner: CopyLabel.load(heads[owner][1])
            for owner, keeper in pairs.items()
            if keeper == me and owner not in odd
        }
        sends = (
            []
            if label is None or me not in pairs or me in odd
            else [(pairs[me], piece) for piece in (*pieces, label.end)]
        )
        self.nbytes = sum(piece.nbytes for _, piece in sends)
        remarks = self._receive(sends, labels)
        if me in odd:
            remarks.append(
                f"rank {me} has copies of form {heads[me][0]}, rank {pairs[me]} can't keep them: "
                "its paceline is another version"
            )
        answers = [
            msgpack.unpackb(answer) for answer in self._group.gather_bytes(msgpack.packb(remarks))
        ]
        self.seconds.append(time.perf_counter() - began)
        for remark in (remark for answer in answers for remark in answer):
            self.remarks.put(remark)
        if not any(answers):
            # a keeper of other copies knows now that these are elsewhere
            self._shelf.keep(self._names[owner] for owner in labels)
            self.whole = job.step

    def _receive(self, sends: list[tuple[int, Tensor]], labels: dict[int, CopyLabel]) -> list[str]:
        """Send this worker's copy and shelve the one that comes; return the reasons of refusals."""
        ends = {owner: torch.zeros_like(label.end) for owner, label in labels.items()}
        comes = [
            (owner, piece)
            for owner, label in labels.items()
            for piece in (*self._shelf.room(self._names[owner], label), ends[owner])
        ]
        exchange = (
            self._group.exchange_agreed
            if isinstance(self._group, UncheckedExchange)
            else self._group.exchange
        )
        arrived: list[int] = []
        try:
            exchange(sends, comes).wait(
                self._patience + sum(piece.nbytes for _, piece in (*sends, *comes)) / SLOWEST
            )
            arrived = list(labels)
        finally:
            arrived = arrived or [
                owner for owner, label in labels.items() if torch.equal(ends[owner], label.end)
            ]
            for owner in labels.keys() - {*arrived}:
                self._shelf.forfeit(self._names[owner])
            refusals = {
                owner: self._shelf.put(self._names[owner], labels[owner]) for owner in arrived
            }
        return [
            f"rank {self._group.rank}, of rank {owner}: {why}"
            for owner, why in refusals.items()
            if why is not None
        ]
