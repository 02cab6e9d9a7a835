"""A receiver of calls that runs in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline.comm.rpc import RpcMessage, RpcServer, derive_rpc_keys
from tests.harness.jobs import PATIENCE

KEYS = derive_rpc_keys(b"a secret of this job", "job 1")
SECONDS = PATIENCE


class Server:
    """A receiver in a thread, which answers as `act` says."""

    def __init__(self, act: Callable[[RpcServer, RpcMessage], Any], **parts: Any) -> None:
        self.said: list[str] = []
        self.heard: list[RpcMessage] = []
        self.receiver = RpcServer(KEYS, say=self.said.append, **parts)
        self._act, self._over = act, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            message = self.receiver.receive(0.02)
            if message is not None:
                self.heard.append(message)
                self._act(self.receiver, message)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.receiver.close()


def echo(receiver: RpcServer, message: RpcMessage) -> None:
    receiver.answer(message, "echo", message.body, message.tensors)
