"""The channel of a call by `pl.launch`: messages of workers and their launcher to the caller.

caller                            launcher                    workers
  socketpair, one end -- inherited --> . -------- inherited ----> .
  "called"  <---------------------------------------------------- each, before it calls the function
  "status"  <---------------------------------------------------- the first: progress of its run
  "result"  <---------------------------------------------------- each: the returned value
  "failed"  <---------------------------------------------------- one: the traceback of an error
  "verdict" <------------------------ the worker that failed first

A message is JSON. Long content is in a file without a name, whose descriptor travels with the
message. The channel has no name and no port: only processes that have inherited it can write to it.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from paceline.cluster.hosts.peers import Failure

_SOCKET_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET
_MAX_MESSAGE_BYTES = 1 << 16  # bytes of a message without its file


class CallMessage(NamedTuple):
    """A message of a call.

    `body` is an open file, at its beginning, or None. The reader closes it.
    """

    kind: str
    fields: dict[str, Any]
    body: BinaryIO | None


class CallChannel:
    """One end of the channel of a call."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire

    @classmethod
    def from_descriptor(cls, descriptor: int) -> CallChannel:
        """Open the end that this process has inherited. Its own children don't inherit it."""
        os.set_inheritable(descriptor, False)
        return cls(socket.fromfd(descriptor, *_SOCKET_KIND))

    def fileno(self) -> int:
        """Descriptor of the socket, for `select` and `poll`."""
        return self._wire.fileno()

    def close(self) -> None:
        """Close this end. A second call does nothing."""
        self._wire.close()

    def send(
        self,
        kind: str,
        fields: Mapping[str, Any],
        write: Callable[[BinaryIO], object] | None = None,
        *,
        waits: bool = True,
    ) -> bool:
        """Send a message.

        Nothing is sent to a caller that has ended.

        Args:
            kind: Kind of the message.
            fields: Its fields, as JSON.
            write: Function that writes the file of the message. Default: it has no file.
            waits: Whether to wait if the other end has not read for long. Otherwise the message is
                dropped.

        Returns:
            Whether the message was sent.
        """
        # The file has no name. It exists until the receiver, which gets a copy of the descriptor,
        # closes it too.
        descriptor = None if write is None else os.memfd_create("paceline-call", os.MFD_CLOEXEC)
        try:
            ancillary = []
            if write is not None and descriptor is not None:
                with open(descriptor, "wb", closefd=False) as file:
                    write(file)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            flags = socket.MSG_NOSIGNAL | (0 if waits else socket.MSG_DONTWAIT)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
                self._wire.sendmsg([json.dumps([kind, dict(fields)]).encode()], ancillary, flags)
                return True
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> CallMessage | None:
        """Receive the next message that has come, without waiting.

        None if there is no message, or all other ends are closed.
        """
        try:
            data, ancillary, _, _ = self._wire.recvmsg(
                _MAX_MESSAGE_BYTES,
                socket.CMSG_SPACE(4),
                socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
            )
        except (BlockingIOError, ConnectionResetError):
            return None
        # The descriptor becomes a file before anything can fail: otherwise it would stay open.
        descriptors = array.array("i")
        for _, _, data_of_descriptor in ancillary:
            descriptors.frombytes(data_of_descriptor)
        body = os.fdopen(descriptors[0], "rb") if descriptors else None
        if not data:
            return None
        if body is not None:
            # Sender and receiver share the position, which is at the end after writing.
            body.seek(0)
        kind, fields = json.loads(data)
        return CallMessage(kind, fields, body)


def make_channel() -> tuple[CallChannel, socket.socket]:
    """Make a channel. Returns the end of the caller, and the end that other processes inherit."""
    caller_end, inherited_end = socket.socketpair(*_SOCKET_KIND)
    return CallChannel(caller_end), inherited_end


def make_verdict_sender(call: tuple[int, int] | None) -> Callable[[Failure], None] | None:
    """Make the function that tells the caller which worker has failed first. None without a call.

    `call` has the descriptors of a `LaunchRequest`.
    """
    return None if call is None else partial(_send_verdict, CallChannel.from_descriptor(call[1]))


def _send_verdict(channel: CallChannel, failure: Failure) -> None:
    """Send the verdict: the failed worker, a line about it, and the end of its output."""
    fields = {"number": failure.rank, "line": failure.summary_line().removeprefix("paceline: ")}
    channel.send("verdict", fields, lambda file: file.write(failure.tail.encode(errors="replace")))
