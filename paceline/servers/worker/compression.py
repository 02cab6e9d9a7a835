"""The codec between a worker and the servers, on the worker's side: what a push loses is kept and
sent with the next one.

    worker                                                  server
    push   gradient + residual  --encode-->  message  --->  decode, add to those of the other
                                                            workers
           residual = what the message lost
    pull   parameters           <-------------------------  parameters, exactly

A residual counts when the turn is over (`commit`), and is discarded if the turn failed (`forget`).
A gradient that is pushed twice in a step is encoded from the same residual.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.codec.codec import Codec, finite
from paceline.codec.coding import NARROWED, Coding, room, seeded
from paceline.comm.group_protocol import FinishedWork, Traffic
from paceline.servers.process.codings import CodingPhase, Phases, at, phases
from paceline.servers.protocol.message import send
from paceline.servers.protocol.service import Echo
from paceline.servers.worker.units import ServerLinks, TransferUnit, rows
from paceline.sync.base import Slot
from paceline.sync.codec_cost import (
    SAMPLE,
    CodecAccount,
    CodecTurn,
    ExactRate,
    ExchangeCost,
    exposed,
    measure,
    sampled,
)
from paceline.sync.context import SyncContext

Key = tuple[int, int]  # a unit: its server, and its number there


class PushTimes(NamedTuple):
    """One push: when it left; its bytes, and those of the exact tensor; seconds of a processor
    to encode it, and to decode it.
    """

    when: float
    sent: int
    exact: int
    encoding: float
    decoding: float


@dataclass
class CodecCounts:
    """Counts of what went through the codec."""

    pushes: list[PushTimes] = field(default_factory=list)


class PushPullCodec:
    """The codec of one worker."""

    def __init__(self, context: SyncContext, codec: Codec | Coding | None) -> None:
        self._context, self._codec = context, codec
        self._units: dict[Key, TransferUnit] = {}  # the coded ones
        self._numbers: dict[Key, int] = {}  # numbers of the coded units
        self._kept: dict[Key, Tensor] = {}  # residuals, as of the last turn that counted
        self._stepped: dict[Key, Tensor] = {}  # as of the last step, in this turn
        self._pushed: dict[Key, Tensor] = {}  # residuals that the next step would leave
        self._narrowed = False  # whether it was said that float64 values are narrowed
        self._every = 1  # one element in so many is sampled
        self._decoding: dict[int, float] = {}  # seconds of decoding, by unit
        self._counted, self._turn = CodecCounts(), CodecTurn(0, 0, 0, 0, 0)
        self.account = CodecAccount(repr(codec), "what servers got of a gradient")

    def ways(self, slot: Slot) -> Phases:
        """Return the codings of a parameter; none for dtypes that aren't real."""
        found = phases(self._codec, slot.name, slot.parameter.shape)
        if found and not slot.parameter.dtype.is_floating_point:
            self._context.announce(
                f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for "
                "real numbers"
            )
            return ()
        if found and slot.parameter.dtype == torch.float64 and not self._narrowed:
            self._narrowed = True
            self._context.announce(NARROWED)
        return found

    def lay_out(self, units: Sequence[TransferUnit]) -> None:
        """Code these units from now on, without residuals."""
        self._units = {(unit.server, unit.number): unit for unit in units if unit.ways}
        self._numbers = {key: number for number, key in enumerate(self._units)}
        for kept in (self._kept, self._stepped, self._pushed):
            kept.clear()
        self._every = max(1, sum(unit.flat.numel() for unit in self._units.values()) // SAMPLE)
        if self._units and self.account not in self._context.accounts:
            self._context.accounts.append(self.account)

    def measure(self, connections: ServerLinks, seconds: float) -> None:
        """Measure how fast the link to the servers is, if anything is coded. Collective."""
        if self._units and self.account.rate is None:
            before = connections.traffic + Traffic()
            found = measure(
                self._context.group,
                torch.device("cpu"),
                lambda x: LinkEcho(connections, x, seconds),
            )
            self.account.rate = ExactRate(found.latency, found.per_byte, 2.0)  # there and back
            self._context.probe_traffic.add_sent(connections.traffic - before)

    # ---- what is sent

    def encode(self, unit: TransferUnit, used: bytes, *, counts: bool) -> Tensor:
        """Encode a unit whose gradients are laid out, with its residual but for pieces that were
        not `used`. Returns the message.

        `counts`: whether the server will use it; if not, all residuals are kept.
        """
        if not unit.ways:
            return unit.flat
        began, key, turn = (
            time.thread_time(),
            (unit.server, unit.number),
            self._context.step_state.turn,
        )
        phase, base = (
            at(unit.ways, turn),
            self._stepped.get(key, self._kept.get(key)) if counts else None,
        )
        self._pushed.pop(key, None)
        held = None  # the part of the residual that stays here, as its piece is not used
        given = unit.flat if phase.coding is None else unit.flat.float()
        if base is not None:
            held = _unused(unit, used, base)
            given = (given + (base if held is None else base - held)).to(given.dtype)
        sent, left = given, None
        if phase.coding is not None:
            sent, left = self._code(phase, given, self._numbers[key], spare=given is not unit.flat)
        if left is None and base is not None:
            self._pushed[key] = torch.zeros_like(base) if held is None else held
        elif left is not None and counts and finite(left):
            for view, reached in zip(unit.over(left), used, strict=True):
                if not reached:
                    view.zero_()  # the server leaves out whatever the coding makes of zeros there
            self._pushed[key] = left if held is None else left.add_(held)
        decoding = self._decoding.get(self._numbers[key], 0.0) if phase.coding is not None else 0.0
        took = time.thread_time() - began
        self._counted.pushes.append(
            PushTimes(time.perf_counter(), sent.nbytes, unit.flat.nbytes, took, decoding)
        )
        return sent

    def _code(
        self, phase: CodingPhase, given: Tensor, index: int, *, spare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the message, and the residual if one is kept.

        `spare`: `given` isn't needed afterwards.
        """
        coding, turn = phase.coding, self._context.step_state.turn
        assert coding is not None
        whole, message = room(coding, given.numel())
        coding.encode(given, message, seeded(turn, index, self._context.group.rank))
        looked = index == turn % len(self._units)  # one unit is sampled in a turn
        if not phase.feedback and not looked:
            return whole, None
        before = sampled(given, self._every, turn)
        left = given if spare else given.clone()
        began = time.thread_time()
        coding.add(message, left, minus=True)
        self._decoding[index] = time.thread_time() - began
        if looked:
            self.account.compare(FinishedWork(before), before - sampled(left, self._every, turn))
        return whole, left if phase.feedback else None

    # ---- what is kept

    def over(self, units: Sequence[TransferUnit], *, stepped: bool) -> None:
        """Keep the new residuals of these units, whose pushes are in a step; discard them if not
        `stepped`.
        """
        for key in {(unit.server, unit.number) for unit in units}.intersection(self._pushed):
            left = self._pushed.pop(key)
            if stepped:
                self._stepped[key] = left

    def commit(self) -> None:
        """Let the residuals of this turn count."""
        self._kept |= self._stepped
        self._stepped.clear()
        if self._turn.exact:
            self.account.settle()
            self.account.add(self._turn)
            self._turn = CodecTurn(0, 0, 0, 0, 0)

    def forget(self) -> None:
        """Discard the residuals of this turn, which has failed."""
        self._stepped.clear()
        self._pushed.clear()
        self._counted, self._turn = CodecCounts(), CodecTurn(0, 0, 0, 0, 0)

    def residuals(self, slots: Sequence[Slot]) -> list[Tensor | None]:
        """Return the residual of each slot, with the turn under way, in the shape of the
        parameter; None where there is none.
        """
        found: list[Tensor | None] = [None] * len(slots)
        for key, residual in (self._kept | self._stepped).items():
            for (piece, _), view in zip(
                self._units[key].members, self._units[key].over(residual), strict=True
            ):
                whole = found[piece.slot]
                if whole is None:
                    whole = found[piece.slot] = torch.zeros_like(
                        slots[piece.slot].parameter, dtype=torch.float32, requires_grad=False
                    )
                rows(whole, piece).copy_(view)
        return found

    def take_over(self, found: Sequence[Sequence[Tensor | None]]) -> None:
        """Replace my residuals by the sum of these `residuals` of several workers, to send them
        later.
        """
        self.forget()
        self._kept.clear()
        for key, unit in self._units.items():
            numbers = {piece.slot for piece, _ in unit.members}
            if any(states[number] is not None for states in found for number in numbers):
                self._kept[key] = torch.zeros(unit.flat.numel(), dtype=torch.float32)
                for (piece, _), view in zip(unit.members, unit.over(self._kept[key]), strict=True):
                    for whole in (states[piece.slot] for states in found):
                        if whole is not None:
                            view.add_(rows(whole, piece))

    def state_dict(self, slots: Sequence[Slot]) -> dict[str, Any]:
        """State of this worker that must survive; empty without a codec."""
        return (
            {"codec": repr(self._codec), "residuals": self.residuals(slots)} if self._units else {}
        )

    def load_state_dicts(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Go on from every worker's `state_dict`, in rank order: the sum of all residuals stays
        the same.
        """
        written = next((state["codec"] for state in found if "codec" in state), None)
        mine, group = repr(self._codec) if self._units else None, self._context.group
        if written is not None and written != mine:
            self._context.announce(
                f"the checkpoint was written with codec={written}, this is codec={mine}: "
                "what that had kept is dropped"
            )
            found = []
        self.take_over(
            [
                state["residuals"]
                for state in found[group.rank :: group.size]
                if "residuals" in state
            ]
        )

    # ---- does it pay

    def waited(self, needed: float, shown: float, servers: int) -> None:
        """Count a step that was waited for since `needed` (of the performance counter), for `shown`
        seconds in all.

        Servers are taken to code as fast as this worker.
        """
        found, self._counted, rate = self._counted, CodecCounts(), self.account.rate
        if rate is None or not found.pushes:
            return
        pushes, half = found.pushes, rate.per_byte / 2
        # a server decodes what all have pushed
        ready, each = [push.when for push in pushes], self._context.group.size / servers
        coded = exposed(
            ready,
            [
                ExchangeCost(0.0, rate.latency / 2 + half * push.sent, each * push.decoding)
                for push in pushes
            ],
            needed,
        )
        exact = exposed(
            ready,
            [ExchangeCost(0.0, rate.latency / 2 + half * push.exact, 0.0) for push in pushes],
            needed,
        )
        encoding = sum(push.encoding for push in pushes)
        more = coded + encoding - exact  # my encoding is part of backward
        self._turn.sent += sum(push.sent for push in pushes)
        self._turn.exact += sum(push.exact for push in pushes)
        self._turn.coding += encoding
        self._turn.shown += shown
        self._turn.exact_shown += max(shown - more, 0.0)


class LinkEcho:
    """Measures a link: a tensor goes to all servers, a part to each, and comes back."""

    def __init__(self, connections: ServerLinks, x: Tensor, seconds: float) -> None:
        self._seconds = seconds
        pieces = zip(connections.callers, x.tensor_split(len(connections.callers)), strict=True)
        self._sent = [send(caller, Echo(piece), seconds) for caller, piece in pieces]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the tensor is back."""
        for sent in self._sent:
            sent.wait(self._seconds)

    def done(self) -> bool:
        return not self._sent

    def exception(self) -> BaseException | None:
        return None


def _unused(unit: TransferUnit, used: bytes, base: Tensor) -> Tensor | None:
    """Return the pieces of a residual that are not used, with zeros elsewhere; None if all are
    used.
    """
    if all(used):
        return None
    held = base.clone()
    for view, reached in zip(unit.over(held), used, strict=True):
        if reached:
            view.zero_()
    return held
