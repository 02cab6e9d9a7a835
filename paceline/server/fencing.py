"""Fencing: after a loss out of lockstep, servers refuse messages of lost workers, and report to the living what has been made.

reckon(workers)     only these are heard from now on, delayed messages are discarded; which steps have been made here
since(step)         how the later ones were made, for a server that lacks them
void                discard pushes that are in no step; give the `journal`
drop(pieces)        samples that no step will have
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgpack
from torch import Tensor

from paceline.comm.rpc import RpcMessage
from paceline.errors import Mismatch
from paceline.server.journal import StepJournal
from paceline.server.shard import Shard
from paceline.state.snapshot import byte_tensor

OPEN = {"alive", "end", "reckon"}  # kinds of messages that any process with the key may send


class FencedServer(Protocol):
    """The server, as fencing sees it."""

    @property
    def shard(self) -> Shard:
        """The shard that the server keeps."""
        ...

    def answer(self, message: RpcMessage, body: Mapping[str, Any] | None = None, tensors: tuple[Tensor, ...] = ()) -> bool:
        """Answer a message."""
        ...

    def clear(self) -> None:
        """Discard delayed messages, and the norms of steps that may change."""
        ...


class Fence:
    """Answers the messages of the living after a loss; False where the answer has to wait."""

    def __init__(self, server: FencedServer) -> None:
        self.journal = StepJournal()
        self._server = server
        self._workers: frozenset[int] | None = None  # the living; None: no worker has been lost yet
        self.kinds: dict[str, Callable[[RpcMessage], bool]] = {
            "reckon": self._reckon,
            "since": self._since,
            "void": self._void,
            "drop": self._drop,
        }

    def check(self, message: RpcMessage) -> None:
        """Raise `Mismatch` for a message of a lost worker: it is on its way still, and the living have gone on."""
        if self._workers is not None and message.sender not in self._workers and message.kind not in OPEN:
            raise Mismatch(f"worker {message.sender} counts as lost: the others have gone on without it")

    def _reckon(self, message: RpcMessage) -> bool:
        self._workers = frozenset(map(int, message.body["workers"]))
        self._server.clear()
        self._server.shard.forget(self._workers)
        return self._server.answer(message, {"steps": self._server.shard.steps})

    def _since(self, message: RpcMessage) -> bool:
        found = self.journal.since(int(message.body["optimizer"]), message.step)
        return self._server.answer(message, tensors=(byte_tensor(msgpack.packb(found)),))

    def _void(self, message: RpcMessage) -> bool:
        self._server.shard.discard()
        return self._server.answer(message, tensors=(byte_tensor(self.journal.dump(closes=False)),))

    def _drop(self, message: RpcMessage) -> bool:
        self.journal.drop(int(message.body["epoch"]), message.body["pieces"])
        return self._server.answer(message)
