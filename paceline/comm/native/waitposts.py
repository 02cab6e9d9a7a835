"""Publishes in the store what this rank waits for, and reads what the others wait for; in a
thread, as a store may hang.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.cluster.store import Store, over
from paceline.comm.p2p.connection import SILENCE
from paceline.comm.waitgraph import RankWait, apart
from paceline.errors import SecretError, WorkerLost

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

PERIOD = 0.3  # seconds between two looks at the others


class GroupEnd(NamedTuple):
    """Why a group has ended: the name of an error, its message, and the ranks that are gone."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


class Waitposts:
    """The waits of all ranks of one group.

    `stuck` holds ranks that wait for each other for ever, once there are some.

    Nothing is posted, and no thread runs, before the first `enter`.
    """

    def __init__(self, store: TorchStore | Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = over(store), rank, size
        self._changed = threading.Condition()
        self._wait: RankWait | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.others: dict[int, RankWait] = {}
        self.stuck: dict[int, RankWait] = {}
        self._store.put(f"wait/{rank}", None)

    def enter(self, wait: RankWait) -> None:
        """Publish that this rank waits here now."""
        with self._changed:
            if self._wait == wait:
                return
            self._wait = wait
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._watch, name="paceline lookout", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def leave(self) -> None:
        """Publish that this rank doesn't wait any more."""
        with self._changed:
            self._wait = None
            self.others = {}
            self._changed.notify_all()

    def verdict(self, mine: GroupEnd, seconds: float = SILENCE) -> GroupEnd:
        """Return why this group has ended: the reason that the first rank published, if
        `seconds` are enough to learn it; else `mine`.
        """
        answers: list[GroupEnd] = []

        def ask() -> None:
            try:
                kind, text, ranks = self._store.first("verdict", mine)
                answers.append(GroupEnd(str(kind), str(text), tuple(map(int, ranks))))
            except (WorkerLost, SecretError, ValueError, TypeError):
                return  # the store is gone, too, or a stranger writes to it

        thread = threading.Thread(target=ask, name="paceline verdict", daemon=True)
        thread.start()
        thread.join(seconds)
        return answers[0] if answers else mine

    def close(self) -> None:
        """End the thread, soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _watch(self) -> None:
        posted: RankWait | None = None
        suspects: dict[int, RankWait] = {}
        while not self._closed:
            with self._changed:
                wait = self._wait
            try:
                if wait != posted:
                    self._store.put(f"wait/{self._rank}", wait)
                    posted, suspects = wait, {}
                stuck = self._look(wait) if wait is not None else {}
            except WorkerLost:
                return  # without a store nothing can be announced
            with self._changed:
                if wait is not None and wait == self._wait:
                    # waits that were all there at the end of one look and at the beginning of the
                    # next were there together
                    self.stuck = stuck if stuck and stuck == suspects else {}
                    suspects = stuck
                if not self._closed and self._wait == posted:
                    self._changed.wait(PERIOD if posted is not None else None)

    def _look(self, mine: RankWait) -> dict[int, RankWait]:
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        posts = self._store.look([f"wait/{rank}" for rank in ranks])
        waits = {
            rank: wait
            for rank, post in zip(ranks, posts, strict=True)
            if (wait := _wait(post)) is not None
        }
        with self._changed:
            self.others = waits
        return apart({**waits, self._rank: mine})


def _wait(post: Any) -> RankWait | None:
    """Parse another rank's announcement; None if that rank waits for nothing, or if the
    announcement is no wait.
    """
    try:
        return None if post is None else RankWait(*post)
    except TypeError:
        return None
