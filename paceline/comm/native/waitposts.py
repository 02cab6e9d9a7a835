"""Publishes in the store what this rank waits for, and reads what other ranks wait for.

A thread does both, as a store may hang.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cluster.store import Store, wrap_store
from paceline.comm.p2p.connection import SILENCE
from paceline.comm.waitgraph import RankWait, find_stuck
from paceline.errors import SecretError, WorkerLost

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

PERIOD = 0.3  # seconds between two looks at the other ranks' waits


class GroupEnd(NamedTuple):
    """Why a group has ended: name of an error, its message, and the ranks that are gone."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


class Waitposts:
    """The waits of all ranks of one group.

    `others` holds the waits of other ranks, `stuck` those that can never end, as ranks wait for
    each other. Nothing is published, and no thread runs, before the first `post_wait`.
    """

    def __init__(self, store: TorchStore | Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = wrap_store(store), rank, size
        self._changed = threading.Condition()
        self._wait: RankWait | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.others: dict[int, RankWait] = {}
        self.stuck: dict[int, RankWait] = {}
        self._store.put(f"wait/{rank}", None)

    def post_wait(self, wait: RankWait) -> None:
        """Publish that this rank waits here from now on."""
        with self._changed:
            if self._wait == wait:
                return
            self._wait = wait
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._watch_others, name="paceline lookout", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def clear_wait(self) -> None:
        """Publish that this rank waits no more."""
        with self._changed:
            self._wait = None
            self.others = {}
            self._changed.notify_all()

    def decide_end(self, own: GroupEnd, seconds: float = SILENCE) -> GroupEnd:
        """Publish why this group has ended, and return the end that the first rank published.

        It is `own` if no answer of the store comes within `seconds`.
        """
        answers: list[GroupEnd] = []

        def ask() -> None:
            try:
                kind, text, ranks = self._store.set_if_absent("verdict", own)
                answers.append(GroupEnd(str(kind), str(text), tuple(map(int, ranks))))
            except (WorkerLost, SecretError, ValueError, TypeError):
                return  # the store is gone, too, or a stranger writes to it

        # In a thread, as the store may have gone with the host that it was on.
        thread = threading.Thread(target=ask, name="paceline verdict", daemon=True)
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else own

    def close(self) -> None:
        """Let the thread end soon, without waiting for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch_others(self) -> None:
        posted: RankWait | None = None
        suspects: dict[int, RankWait] = {}
        while not self._closed:
            with self._changed:
                wait = self._wait
            try:
                if wait != posted:
                    self._store.put(f"wait/{self._rank}", wait)
                    posted, suspects = wait, {}
                stuck = self._look_at_others(wait) if wait is not None else {}
            except WorkerLost:
                return  # without a store nothing can be announced
            with self._changed:
                if wait is not None and wait == self._wait:
                    # Waits are read one after another. Those that were there at the end of one look
                    # and are the same in the next were all there at one moment in between.
                    self.stuck = stuck if stuck and stuck == suspects else {}
                    suspects = stuck
                if not self._closed and self._wait == posted:
                    self._changed.wait(PERIOD if posted is not None else None)

    def _look_at_others(self, own: RankWait) -> dict[int, RankWait]:
        # One question to the store for all ranks.
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        posts = self._store.read_values([f"wait/{rank}" for rank in ranks])
        waits = {
            rank: wait
            for rank, post in zip(ranks, posts, strict=True)
            if (wait := _parse_wait(post)) is not None
        }
        with self._changed:
            self.others = waits
        return find_stuck({**waits, self._rank: own})


def _parse_wait(post: Any) -> RankWait | None:
    """Read another rank's post. None if it waits for nothing, or the post makes no sense."""
    try:
        return None if post is None else RankWait(*post)
    except TypeError:
        return None
