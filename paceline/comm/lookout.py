"""Tells other ranks through the store what this one waits for, and finds out whom it waits for; in a thread, as a store may hang."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed import DistError

from paceline.comm.waits import Wait, apart

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import Store as TorchStore

PERIOD = 0.3  # seconds between two looks at the others


class Verdict(NamedTuple):
    """Why a group has ended: the name of an error, its message, and the ranks that are gone."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()


class Lookout:
    """The waits of all ranks of one group. `stuck` holds ranks that wait for each other for ever, once there are some.

    Nothing is posted, and no thread runs, before the first `enter`.
    """

    def __init__(self, store: TorchStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._changed = threading.Condition()
        self._wait: Wait | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self.others: dict[int, Wait] = {}
        self.stuck: dict[int, Wait] = {}
        store.set(f"wait/{rank}", "")

    def enter(self, wait: Wait) -> None:
        """This rank waits here now."""
        with self._changed:
            if self._wait == wait:
                return
            self._wait = wait
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="paceline lookout", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def leave(self) -> None:
        """This rank doesn't wait any more."""
        with self._changed:
            self._wait = None
            self.others = {}
            self._changed.notify_all()

    def verdict(self, mine: Verdict, seconds: float = 1.0) -> Verdict:
        """Why this group has ended: what the first rank said that found out, if `seconds` are enough to learn it; else `mine`."""
        answers: list[Verdict] = []

        def ask() -> None:
            try:
                kind, text, ranks = json.loads(self._store.compare_set("verdict", "", json.dumps(mine)))
            except DistError:
                return  # the store is gone, too
            answers.append(Verdict(kind, text, tuple(ranks)))

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
        posted: Wait | None = None
        suspects: dict[int, Wait] = {}
        while not self._closed:
            with self._changed:
                wait = self._wait
            try:
                if wait != posted:
                    self._store.set(f"wait/{self._rank}", json.dumps(wait) if wait is not None else "")
                    posted, suspects = wait, {}
                found = self._look(wait) if wait is not None else {}
            except DistError:
                return  # without a store nothing can be told
            with self._changed:
                if wait is not None and wait == self._wait:
                    # waits that were all there at the end of one look and at the beginning of the next were there together
                    self.stuck = found if found and found == suspects else {}
                    suspects = found
                if not self._closed and self._wait == posted:
                    self._changed.wait(PERIOD if posted is not None else None)

    def _look(self, mine: Wait) -> dict[int, Wait]:
        keys = [f"wait/{rank}" for rank in range(self._size) if rank != self._rank]
        texts = self._store.multi_get(keys)
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        waits = {rank: Wait(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True) if text}
        with self._changed:
            self.others = waits
        return apart({**waits, self._rank: mine})
