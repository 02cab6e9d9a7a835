"""Callers that have not proved yet that they know the secret.

    accept ---> [ caller caller caller ... ]  at most `MOST_CALLERS`; with more, the oldest caller
                     |            |           of the address that has most of them is dropped
                malformed     proves itself and sends a message
                 dropped      handed on

They are few at a time, none stays for long, and none can do anything else.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from paceline.cluster.hosts.channel import Channel, ChannelBroken, Introduction
from paceline.errors import SecretError
from paceline.timings import DEFAULT_TIMINGS, ChannelTimings

MOST_CALLERS = 128  # callers that have not proved anything
_ACCEPTED_AT_ONCE = 64  # callers accepted before anything else is done


def _ignore_text(text: str) -> None:
    return


class Handshakes:
    """Accepts callers, and hands on the ones that know the secret.

    Args:
        secret: Secret of the job.
        say: Called once with a message if a caller has another secret. Default: no message.
        timings: Waits of a channel.
    """

    def __init__(
        self,
        secret: bytes,
        say: Callable[[str], None] = _ignore_text,
        *,
        timings: ChannelTimings = DEFAULT_TIMINGS.channel,
    ) -> None:
        self.last_secret_error = ""  # the error of the last caller that had another secret
        self._secret, self._say, self._timings = secret, say, timings
        # By descriptor, in the order of arrival
        self._callers: dict[int, Introduction] = {}

    def list_descriptors(self) -> list[int]:
        """List the descriptors on which callers may send."""
        return [*self._callers]

    def accept_callers(self, listening: socket.socket) -> None:
        """Accept all callers that wait at this socket, which doesn't block."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listening.accept()
            except OSError as error:
                # No caller waits any more, or it has hung up, or there are too many open files.
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(0)
                if error.errno != errno.ECONNABORTED:
                    return
                continue
            caller = Introduction(connection, self._secret, str(address[0]), self._timings.hello)
            self._callers[connection.fileno()] = caller
            self._make_room(MOST_CALLERS)

    def receive_first_message(self, descriptor: int) -> tuple[Channel, dict[str, Any]] | None:
        """Read what this caller has sent.

        Returns:
            Its channel, which isn't held here any more, and its first message, once it has proved
            itself; else None.
        """
        caller = self._callers.get(descriptor)
        if caller is None:
            return None
        try:
            message = caller.receive_first_message()
        except ChannelBroken:
            self._drop_caller(caller)
            return None
        except SecretError as error:
            if not self.last_secret_error:
                self._say(f"{error} (it was turned away, and others are let in)")
            self.last_secret_error = str(error)
            self._drop_caller(caller)
            return None
        if message is None:
            return None
        del self._callers[descriptor]
        return caller.channel, message

    def drop_late_callers(self, now: float | None = None) -> None:
        """Drop callers that have taken too long."""
        now = time.monotonic() if now is None else now
        for caller in [each for each in self._callers.values() if now > each.deadline]:
            self._drop_caller(caller)

    def list_trusted_channels(self) -> list[Channel]:
        """List the channels of callers that have proved themselves but sent no message yet."""
        return [caller.channel for caller in self._callers.values() if caller.is_trusted]

    def close(self) -> None:
        """Drop all callers."""
        for caller in [*self._callers.values()]:
            self._drop_caller(caller)

    def _make_room(self, most: int) -> None:
        """Drop a caller if there are more than `most` that have not proved themselves.

        It is the oldest one of the address that has most of them, so one stranger can't keep others
        out.
        """
        unproved = [caller for caller in self._callers.values() if not caller.is_trusted]
        if len(unproved) > most:
            ((crowded_address, _),) = Counter(caller.address for caller in unproved).most_common(1)
            self._drop_caller(
                next(caller for caller in unproved if caller.address == crowded_address)
            )

    def _drop_caller(self, caller: Introduction) -> None:
        del self._callers[caller.channel.fileno()]
        caller.channel.close()
