"""Sends copies of state to their keepers while training goes on.

Each worker has a thread for it, and the threads have a group of their own.

    rank 0   label ─┐          ┌─ label of rank 2   bytes to rank 2 ──────>   complete? ─┐
    rank 1   none  ─┼─ gather ─┤                                                        ├─ gather
    rank 2   label ─┘          └─ label of rank 0   bytes to rank 0 ──────>   complete? ─┘

All workers send at the same steps. If a transfer breaks off, a copy is kept only if all of its
bytes had arrived. Its last bytes (the end marker) show that.
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

from paceline.at_exit import call_at_exit
from paceline.comm.collectives import UncheckedExchange
from paceline.comm.group_protocol import Group, Traffic
from paceline.elastic.state_copies import (
    LABEL_FORM,
    CopyLabel,
    CopyStore,
    assign_keepers,
    pack_copy,
)
from paceline.errors import RECOVERABLE_ERRORS, PacelineError
from paceline.timings import DEFAULT_TIMINGS, RecoveryTimings
from paceline.trace import Trace

POLL_INTERVAL = 0.1  # seconds between two checks of a wait
MIN_BYTES_PER_SECOND = 1e6  # bytes per second. A slower copy counts as stuck.


class _Transfer:
    """One worker's part in a transfer: its state after a step. None: it has no such state."""

    def __init__(self, state: Any, step: int) -> None:
        self.state, self.step = state, step
        self.has_ended = threading.Event()


class Replicator:
    """Sends copies over a group of its own.

    Invariants: the worker calls `start_transfer` only while no transfer is under way. Until the
    transfer has ended, only the thread writes the other attributes. After `error` is set, nothing
    is sent any more.

    Args:
        group: The group for copies. It is closed together with the replicator.
        hosts: Host of each rank.
        names: Number of the worker of each rank.
        shelf: Keeps the copies that arrive.
        trace: Trace of the run. Default: none.
        timings: Timeouts.
    """

    # Seconds that training has waited for this group. It is 0, as `wait_for_transfer` is announced.
    waited = 0.0

    def __init__(
        self,
        group: Group,
        hosts: Sequence[int],
        names: Sequence[int],
        shelf: CopyStore,
        *,
        trace: Trace | None = None,
        timings: RecoveryTimings = DEFAULT_TIMINGS.recovery,
    ) -> None:
        self._wait_seconds = timings.copy
        self._group, self._hosts, self._worker_numbers, self._copy_store = (
            group,
            tuple(hosts),
            tuple(names),
            shelf,
        )
        self._trace = Trace(0) if trace is None else trace
        self.traffic = Traffic()  # at the start of the last transfer
        self.error: PacelineError | None = None
        self.owner_numbers: frozenset[int] = (
            frozenset()
        )  # numbers of the owners at the last transfer
        self.complete_step = 0  # last step after which all copies were complete
        self.sent_nbytes = 0  # bytes of the last copy that this worker has sent
        self.transfer_seconds: deque[float] = deque(maxlen=5)  # durations of the last transfers
        # Messages about copies that were refused. All workers get them.
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._transfer: _Transfer | None = None
        self._transfer_queue: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run_thread, name="paceline courier", daemon=True
        )
        self._thread.start()
        # A thread that is inside of torch while Python ends would crash the process.
        self._unregister = call_at_exit(self.close)

    # ---- the worker's calls

    @property
    def is_idle(self) -> bool:
        """Whether no transfer is under way."""
        return self._transfer is None or self._transfer.has_ended.is_set()

    @property
    def can_send(self) -> bool:
        """Whether copies can be sent."""
        return self.error is None and self._thread.is_alive()

    def start_transfer(self, state: Any, step: int) -> None:
        """Start to send this worker's state after `step`. None: it has no such state.

        Its tensors must not change until the transfer has ended.
        """
        assert self.is_idle
        self.traffic = self._group.traffic + Traffic()
        self._transfer = _Transfer(state, step)
        self._transfer_queue.put(self._transfer)

    def wait_for_transfer(self, seconds: float | None = None) -> bool:
        """Wait for the transfer under way, for at most `seconds`.

        Returns whether it has ended, well or not.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while (
            not self.is_idle
            and self._thread.is_alive()
            and (deadline is None or time.monotonic() < deadline)
        ):
            assert self._transfer is not None
            self._transfer.has_ended.wait(POLL_INTERVAL)
        return self.is_idle or not self._thread.is_alive()

    def stop_sending(self) -> None:
        """Stop for a change of the group. A transfer under way is aborted only if it is stuck."""
        if not self.wait_for_transfer(self._wait_seconds):
            self.abort()
            self.wait_for_transfer(self._wait_seconds)

    def close(self) -> None:
        """End the thread and the group. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._unregister()
        self._transfer_queue.put(None)
        self._thread.join(self._wait_seconds if self.can_send else POLL_INTERVAL)
        self._group.close()
        self._thread.join(POLL_INTERVAL)

    def abort(self) -> None:
        """Abort the transfer under way, without waiting for other workers."""
        self._group.abort()

    # ---- the thread

    def _run_thread(self) -> None:
        torch.set_num_threads(1)
        while (transfer := self._transfer_queue.get()) is not None:
            try:
                if self.error is None:
                    with self._trace.measure_span(f"copy of step {transfer.step}", "buddies"):
                        self._send_copies(transfer)
            except RECOVERABLE_ERRORS as error:
                self.error = error
            except PacelineError as error:
                self.error = error
                self.abort()  # otherwise other workers would wait for this one
            finally:
                transfer.has_ended.set()

    def _send_copies(self, transfer: _Transfer) -> None:
        """Send this worker's copy to its keeper, and receive the copies that this worker keeps."""
        # 1. All workers learn who has a copy, and compute the same keepers from that.
        label, pieces = (
            (None, []) if transfer.state is None else pack_copy(transfer.state, transfer.step)
        )
        headers = [
            msgpack.unpackb(header)
            for header in self._group.gather_bytes(
                msgpack.packb([LABEL_FORM, None if label is None else label.encode_label()])
            )
        ]
        start, own_rank = time.perf_counter(), self._group.rank
        owners = {
            rank: self._hosts[rank]
            for rank, (_, header) in enumerate(headers)
            if header is not None
        }
        self.owner_numbers = frozenset(self._worker_numbers[rank] for rank in owners)
        keeper_of = assign_keepers(owners)
        # Workers with different versions of paceline can't keep each other's copies.
        unlike_owners = [
            owner for owner, keeper in keeper_of.items() if headers[owner][0] != headers[keeper][0]
        ]
        labels = {
            owner: CopyLabel.decode_label(headers[owner][1])
            for owner, keeper in keeper_of.items()
            if keeper == own_rank and owner not in unlike_owners
        }
        sends = (
            []
            if label is None or own_rank not in keeper_of or own_rank in unlike_owners
            else [(keeper_of[own_rank], piece) for piece in (*pieces, label.end_marker)]
        )
        self.sent_nbytes = sum(piece.nbytes for _, piece in sends)
        # 2. Exchange the bytes.
        messages = self._exchange_copies(sends, labels)
        if own_rank in unlike_owners:
            messages.append(
                f"rank {own_rank} has copies of form {headers[own_rank][0]}, "
                f"rank {keeper_of[own_rank]} can't keep them: its paceline is another version"
            )
        # 3. All workers learn whether all copies are complete.
        answers = [
            msgpack.unpackb(answer) for answer in self._group.gather_bytes(msgpack.packb(messages))
        ]
        self.transfer_seconds.append(time.perf_counter() - start)
        for message in (message for answer in answers for message in answer):
            self.messages.put(message)
        if not any(answers):
            # All copies are complete. So copies of owners that have other keepers now can go.
            self._copy_store.keep_only(self._worker_numbers[owner] for owner in labels)
            self.complete_step = transfer.step

    def _exchange_copies(
        self, sends: list[tuple[int, Tensor]], labels: dict[int, CopyLabel]
    ) -> list[str]:
        """Send this worker's copy and store the ones that arrive. Returns messages of refusals."""
        end_markers = {owner: torch.zeros_like(label.end_marker) for owner, label in labels.items()}
        receives = [
            (owner, piece)
            for owner, label in labels.items()
            for piece in (
                *self._copy_store.prepare_memory(self._worker_numbers[owner], label),
                end_markers[owner],
            )
        ]
        exchange = (
            self._group.exchange_agreed
            if isinstance(self._group, UncheckedExchange)
            else self._group.exchange
        )
        # Also after an error, a copy whose end marker has arrived is complete, and is stored.
        arrived: list[int] = []
        try:
            exchange(sends, receives).wait(
                self._wait_seconds
                + sum(piece.nbytes for _, piece in (*sends, *receives)) / MIN_BYTES_PER_SECOND
            )
            arrived = list(labels)
        finally:
            arrived = arrived or [
                owner
                for owner, label in labels.items()
                if torch.equal(end_markers[owner], label.end_marker)
            ]
            for owner in labels.keys() - {*arrived}:
                self._copy_store.abandon_copy(self._worker_numbers[owner])
            refusals = {
                owner: self._copy_store.accept_copy(self._worker_numbers[owner], labels[owner])
                for owner in arrived
            }
        return [
            f"rank {self._group.rank}, of rank {owner}: {reason}"
            for owner, reason in refusals.items()
            if reason is not None
        ]
