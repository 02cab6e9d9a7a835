"""Calls that all workers have to make, met by name: who does something else is found and named before anything moves."""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from paceline.comm.group import Group
from paceline.errors import Mismatch


class Agreement:
    """The meeting of all workers at named calls, over the control channel of a group.

    `step` gives the current step and `hosts` the host of each rank, for messages.
    """

    def __init__(self, group: Group, *, step: Callable[[], int] = lambda: 0, hosts: tuple[str, ...] = ()) -> None:
        self.group = group
        self._step = step
        self._hosts = hosts

    def meet(self, what: str, body: bytes = b"", *, where: str = "") -> list[bytes]:
        """Every rank's `body`, once all ranks have come to `what` at the same step; raises `Mismatch` on all if some came to something else.

        `where` is not compared; it says in messages how this rank got here.
        """
        if self.group.size == 1:
            return [body]
        step = self._step()
        answers = self.group.agree(msgpack.packb((what, step, where, body)))
        heads = [msgpack.unpackb(answer) for answer in answers]
        if any(head[0] != what or head[1] != step for head in heads):
            raise Mismatch(self._describe(heads))
        return [head[3] for head in heads]

    def _describe(self, heads: list[tuple[str, int, str, bytes]]) -> str:
        places: dict[str, list[str]] = {}
        for rank, (what, step, where, _) in enumerate(heads):
            text = f"{what}{f' ({where})' if where else ''} of step {step}"
            host = f" on {self._hosts[rank]}" if rank < len(self._hosts) else ""
            places.setdefault(text, []).append(f"{rank}{host}")
        sides = "; ".join(f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} at {text}" for text, ranks in places.items())
        return f"workers have come apart: {sides}. Every worker has to make the same collective calls in the same order"
