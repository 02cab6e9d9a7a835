"""Callers that have not yet proved that they know the secret: few at a time, none for long, and all
they can do is be dropped.

accept ---> [ caller caller caller ... ]  at most `MOST`; too many: the oldest goes, of the address
                                          that holds most of them
                 |            |
            says nonsense   proves itself, and says something: it is handed on
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
from paceline.timings import DEFAULTS, ChannelTimings

MOST = 128  # callers that have not proved anything
_AT_ONCE = 64  # let in before anything else is done


def _nothing(text: str) -> None:
    return


class Handshakes:
    """Accepts callers, and hands on those that know the secret.

    `say` is called, once, with news of a caller with another one.
    """

    def __init__(
        self,
        secret: bytes,
        say: Callable[[str], None] = _nothing,
        *,
        timings: ChannelTimings = DEFAULTS.channel,
    ) -> None:
        self.wrong = ""  # the refusal that the last caller with another secret got
        self._secret, self._say, self._timings = secret, say, timings
        # by descriptor, in the order in which they came
        self._callers: dict[int, Introduction] = {}

    def descriptors(self) -> list[int]:
        """Return the descriptors on which callers may send."""
        return [*self._callers]

    def let_in(self, listening: socket.socket) -> None:
        """Accept all that wait at this socket, which doesn't block."""
        for _ in range(_AT_ONCE):
            try:
                connection, address = listening.accept()
            except OSError as error:  # no caller waits there, or it hung up before it was answered
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(0)
                if error.errno != errno.ECONNABORTED:
                    return
                continue
            caller = Introduction(connection, self._secret, str(address[0]), self._timings.hello)
            self._callers[connection.fileno()] = caller
            self._make_room(MOST)

    def hear(self, descriptor: int) -> tuple[Channel, dict[str, Any]] | None:
        """Return this caller's first message once it has proved itself, with its channel, which
        is no longer held here.
        """
        caller = self._callers.get(descriptor)
        if caller is None:
            return None
        try:
            message = caller.step()
        except ChannelBroken:
            self._drop(caller)
            return None
        except SecretError as error:
            if not self.wrong:
                self._say(f"{error} (it was turned away, and others are let in)")
            self.wrong = str(error)
            self._drop(caller)
            return None
        if message is None:
            return None
        del self._callers[descriptor]
        return caller.channel, message

    def tick(self, now: float | None = None) -> None:
        """Drop silent callers."""
        now = time.monotonic() if now is None else now
        for caller in [each for each in self._callers.values() if now > each.late]:
            self._drop(caller)

    def trusted(self) -> list[Channel]:
        """Return the channels of callers that have proved themselves, and have said nothing yet."""
        return [caller.channel for caller in self._callers.values() if caller.trusted]

    def close(self) -> None:
        """Drop all callers."""
        for caller in [*self._callers.values()]:
            self._drop(caller)

    def _make_room(self, most: int) -> None:
        """Drop the oldest caller when there are too many, of the address that most are from: one
        stranger can't keep the others out.
        """
        unproved = [caller for caller in self._callers.values() if not caller.trusted]
        if len(unproved) > most:
            ((crowd, _),) = Counter(caller.address for caller in unproved).most_common(1)
            self._drop(next(caller for caller in unproved if caller.address == crowd))

    def _drop(self, caller: Introduction) -> None:
        del self._callers[caller.channel.fileno()]
        caller.channel.close()
