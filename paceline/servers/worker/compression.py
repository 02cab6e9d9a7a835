"""The worker's side of the codec: it encodes pushes, and adds each residual to the next push.

    worker                                                  server
    push   gradient + residual  --encode-->  message  --->  decode, add to the gradients of the
                                                            other workers
           residual = input - decoded message
    pull   parameters           <-------------------------  parameters, exactly

The new residual counts when the turn is over (`commit_residuals`), and is discarded if the turn has
failed (`discard_residuals`). A gradient that is pushed twice in a step is encoded with the same
residual.
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

Key = tuple[int, int]  # server of a unit, and the unit's number there


class PushTimes(NamedTuple):
    """Time, size and cost of one push."""

    when: float  # reading of the performance counter when the push left
    sent: int  # bytes of the message
    exact: int  # bytes of the tensor without a codec
    encoding: float  # seconds of processor time
    decoding: float  # seconds of processor time


@dataclass
class CodecCounts:
    """The pushes of one step."""

    pushes: list[PushTimes] = field(default_factory=list)


class PushPullCodec:
    """The codec of one worker.

    Residuals move through three maps, all keyed by unit. `_pending_residuals` has the residuals of
    pushes that are in no step yet, `_stepped_residuals` the ones of steps in this turn, and
    `_committed_residuals` the ones of finished turns. Only the last counts if the turn fails. All
    of them are empty without a codec, as `_coded_units` is.
    """

    def __init__(self, context: SyncContext, codec: Codec | Coding | None) -> None:
        self._context, self._codec = context, codec
        self._units: dict[Key, TransferUnit] = {}
        self._numbers: dict[Key, int] = {}  # index of each coded unit, alike on all workers
        self._kept: dict[Key, Tensor] = {}
        self._stepped: dict[Key, Tensor] = {}
        self._pushed: dict[Key, Tensor] = {}
        self._narrowed = False  # whether the user was told that float64 values are narrowed
        self._every = 1  # one in this many elements is sampled
        self._decoding: dict[int, float] = {}  # seconds of decoding, by index of the unit
        self._counted, self._turn = CodecCounts(), CodecTurn(0, 0, 0, 0, 0)
        self.account = CodecAccount(repr(codec), "what servers got of a gradient")

    def ways(self, slot: Slot) -> Phases:
        """Choose the codings of a parameter; none for dtypes that aren't real."""
        codings = phases(self._codec, slot.name, slot.parameter.shape)
        if codings and not slot.parameter.dtype.is_floating_point:
            self._context.announce(
                f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for "
                "real numbers"
            )
            return ()
        if codings and slot.parameter.dtype == torch.float64 and not self._narrowed:
            self._narrowed = True
            self._context.announce(NARROWED)
        return codings

    def lay_out(self, units: Sequence[TransferUnit]) -> None:
        """Code these units from now on, without residuals."""
        self._units = {(unit.server, unit.number): unit for unit in units if unit.ways}
        self._numbers = {key: number for number, key in enumerate(self._units)}
        for residuals in (self._kept, self._stepped, self._pushed):
            residuals.clear()
        self._every = max(1, sum(unit.flat.numel() for unit in self._units.values()) // SAMPLE)
        if self._units and self.account not in self._context.accounts:
            self._context.accounts.append(self.account)

    def measure(self, connections: ServerLinks, seconds: float) -> None:
        """Measure how fast the link to the servers is, if anything is coded. Collective."""
        if self._units and self.account.rate is None:
            before = connections.traffic + Traffic()
            link_rate = measure(
                self._context.group,
                torch.device("cpu"),
                lambda x: LinkEcho(connections, x, seconds),
            )
            # Each byte of the probe travels twice, to the server and back.
            self.account.rate = ExactRate(link_rate.latency, link_rate.per_byte, 2.0)
            self._context.probe_traffic.add_sent(connections.traffic - before)

    # ---- encoding

    def encode(self, unit: TransferUnit, used: bytes, *, counts: bool) -> Tensor:
        """Encode the gradients in a unit's memory, plus their residual. Returns the message.

        Args:
            unit: The unit, whose gradients have been packed.
            used: A flag for each member: whether it has a gradient. The residual of a member
                without one stays here.
            counts: Whether the server will use the message. If not, all residuals stay here.
        """
        if not unit.ways:
            return unit.flat
        began = time.thread_time()
        key, turn = (unit.server, unit.number), self._context.step_state.turn
        phase = at(unit.ways, turn)
        # Start from the residual before this step, also when a unit is pushed again: the residual
        # of the first push is dropped.
        base = self._stepped.get(key, self._kept.get(key)) if counts else None
        self._pushed.pop(key, None)
        held = None  # part of the residual that stays here, as its members are not used
        total = unit.flat if phase.coding is None else unit.flat.float()
        if base is not None:
            held = _unused(unit, used, base)
            total = (total + (base if held is None else base - held)).to(total.dtype)
        message, residual = total, None
        if phase.coding is not None:
            message, residual = self._code(
                phase, total, self._numbers[key], spare=total is not unit.flat
            )
        # Remember the new residual until the step is made. An overflow (inf, nan) leaves none,
        # or it would spoil all later steps.
        if residual is None and base is not None:
            self._pushed[key] = torch.zeros_like(base) if held is None else held
        elif residual is not None and counts and finite(residual):
            for view, is_used in zip(unit.over(residual), used, strict=True):
                if not is_used:
                    view.zero_()  # the server ignores these members of the message
            self._pushed[key] = residual if held is None else residual.add_(held)
        decoding = self._decoding.get(self._numbers[key], 0.0) if phase.coding is not None else 0.0
        encoding = time.thread_time() - began
        self._counted.pushes.append(
            PushTimes(time.perf_counter(), message.nbytes, unit.flat.nbytes, encoding, decoding)
        )
        return message

    def _code(
        self, phase: CodingPhase, flat: Tensor, index: int, *, spare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Encode a flat tensor. Returns the message, and the residual with error feedback.

        `spare` says that `flat` isn't needed afterwards and may be overwritten.
        """
        coding, turn = phase.coding, self._context.step_state.turn
        assert coding is not None
        buffer, message = room(coding, flat.numel())
        coding.encode(flat, message, seeded(turn, index, self._context.group.rank))
        # One unit in each turn is decoded here, to measure the codec's error and time.
        is_sampled = index == turn % len(self._units)
        if not phase.feedback and not is_sampled:
            return buffer, None
        before = sampled(flat, self._every, turn)
        residual = flat if spare else flat.clone()
        began = time.thread_time()
        coding.add(message, residual, minus=True)
        self._decoding[index] = time.thread_time() - began
        if is_sampled:
            after = sampled(residual, self._every, turn)
            self.account.compare(FinishedWork(before), before - after)
        return buffer, residual if phase.feedback else None

    # ---- residuals

    def over(self, units: Sequence[TransferUnit], *, stepped: bool) -> None:
        """End the pushes of these units. If not `stepped`, their new residuals are discarded."""
        for key in {(unit.server, unit.number) for unit in units}.intersection(self._pushed):
            residual = self._pushed.pop(key)
            if stepped:
                self._stepped[key] = residual

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
        """Residual of each slot in the shape of its parameter, or None.

        It includes the steps of the turn under way.
        """
        slot_residuals: list[Tensor | None] = [None] * len(slots)
        for key, residual in (self._kept | self._stepped).items():
            for (piece, _), view in zip(
                self._units[key].members, self._units[key].over(residual), strict=True
            ):
                slot_residual = slot_residuals[piece.slot]
                if slot_residual is None:
                    slot_residual = slot_residuals[piece.slot] = torch.zeros_like(
                        slots[piece.slot].parameter, dtype=torch.float32, requires_grad=False
                    )
                rows(slot_residual, piece).copy_(view)
        return slot_residuals

    def take_over(self, worker_residuals: Sequence[Sequence[Tensor | None]]) -> None:
        """Replace this worker's residuals by the sum of the residuals of several workers.

        `worker_residuals` has for each of these workers the residual of each slot. The sum is sent
        with the next pushes.
        """
        self.forget()
        self._kept.clear()
        for key, unit in self._units.items():
            slots = {piece.slot for piece, _ in unit.members}
            if any(residuals[slot] is not None for residuals in worker_residuals for slot in slots):
                self._kept[key] = torch.zeros(unit.flat.numel(), dtype=torch.float32)
                for (piece, _), view in zip(unit.members, unit.over(self._kept[key]), strict=True):
                    for slot_residual in (residuals[piece.slot] for residuals in worker_residuals):
                        if slot_residual is not None:
                            view.add_(rows(slot_residual, piece))

    def state_dict(self, slots: Sequence[Slot]) -> dict[str, Any]:
        """The codec and its residuals, for a checkpoint; empty without a codec."""
        return (
            {"codec": repr(self._codec), "residuals": self.residuals(slots)} if self._units else {}
        )

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the `state_dict` of every worker, in rank order.

        There may be more or fewer workers now. The sum of all residuals stays the same.
        """
        saved_codec = next((state["codec"] for state in states if "codec" in state), None)
        own_codec, group = repr(self._codec) if self._units else None, self._context.group
        if saved_codec is not None and saved_codec != own_codec:
            self._context.announce(
                f"the checkpoint was written with codec={saved_codec}, this is codec={own_codec}: "
                "its residuals are dropped"
            )
            states = []
        # Rank r takes the residuals of the saved ranks r, r + size, r + 2 size, ...
        self.take_over(
            [
                state["residuals"]
                for state in states[group.rank :: group.size]
                if "residuals" in state
            ]
        )

    # ---- whether the codec pays

    def waited(self, needed: float, shown: float, servers: int) -> None:
        """Account for one step, and estimate the wait without a codec.

        Servers are assumed to decode as fast as this worker.

        Args:
            needed: Reading of the performance counter when the optimizer began to wait.
            shown: Seconds that it waited.
            servers: Number of servers.
        """
        counts, self._counted, rate = self._counted, CodecCounts(), self.account.rate
        if rate is None or not counts.pushes:
            return
        # The rate is of the way there and back: a push takes half of it.
        pushes, half = counts.pushes, rate.per_byte / 2
        # A server decodes the pushes of all workers, for its part of the parameters.
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
        more = coded + encoding - exact  # encoding makes backward longer
        self._turn.sent += sum(push.sent for push in pushes)
        self._turn.exact += sum(push.exact for push in pushes)
        self._turn.coding += encoding
        self._turn.shown += shown
        self._turn.exact_shown += max(shown - more, 0.0)


class LinkEcho:
    """An exchange that measures a link: each server gets a part of a tensor and sends it back."""

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
    """Select the residuals of unused members, with zeros elsewhere; None if all are used."""
    if all(used):
        return None
    held = base.clone()
    for view, is_used in zip(unit.over(held), used, strict=True):
        if is_used:
            view.zero_()
    return held
