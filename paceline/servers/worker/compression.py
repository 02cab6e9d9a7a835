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

from paceline.codec.codec import Codec, is_finite
from paceline.codec.coding import NARROWED, Coding, make_generator, make_message
from paceline.comm.group_protocol import FinishedWork, Traffic
from paceline.servers.process.codings import CodingPhase, Phases, get_phase, make_phases
from paceline.servers.protocol.message import send_request
from paceline.servers.protocol.service import Echo
from paceline.servers.worker.transfer_units import ServerConnections, TransferUnit, select_rows
from paceline.sync.base import Slot
from paceline.sync.codec_cost import (
    SAMPLE_NUMEL,
    CodecAccount,
    CodecTurn,
    ExactRate,
    ExchangeCost,
    exposed_seconds,
    measure_exact_rate,
    sample_elements,
)
from paceline.sync.context import SyncContext

UnitKey = tuple[int, int]  # server of a unit, and the unit's number there


class PushRecord(NamedTuple):
    """Time, size and cost of one push."""

    pushed_at: float  # reading of the performance counter when the push left
    sent_bytes: int  # bytes of the message
    exact_bytes: int  # bytes of the tensor without a codec
    encoding_seconds: float  # seconds of processor time
    decoding_seconds: float  # seconds of processor time


@dataclass
class CodecCounts:
    """The pushes of one step."""

    pushes: list[PushRecord] = field(default_factory=list)


class PushPullCodec:
    """The codec of one worker.

    Residuals move through three maps, all keyed by unit. `_pending_residuals` has the residuals of
    pushes that are in no step yet, `_stepped_residuals` the ones of steps in this turn, and
    `_committed_residuals` the ones of finished turns. Only the last counts if the turn fails. All
    of them are empty without a codec, as `_coded_units` is.
    """

    def __init__(self, context: SyncContext, codec: Codec | Coding | None) -> None:
        self._context, self._codec = context, codec
        self._coded_units: dict[UnitKey, TransferUnit] = {}
        self._unit_indices: dict[
            UnitKey, int
        ] = {}  # index of each coded unit, alike on all workers
        self._committed_residuals: dict[UnitKey, Tensor] = {}
        self._stepped_residuals: dict[UnitKey, Tensor] = {}
        self._pending_residuals: dict[UnitKey, Tensor] = {}
        self._has_announced_narrowing = (
            False  # whether the user was told that float64 values are narrowed
        )
        self._sample_interval = 1  # one in this many elements is sampled
        self._decoding_seconds: dict[int, float] = {}  # seconds of decoding, by index of the unit
        self._step_counts, self._turn_totals = CodecCounts(), CodecTurn(0, 0, 0, 0, 0)
        self.account = CodecAccount(repr(codec), "what servers got of a gradient")

    def choose_codings(self, slot: Slot) -> Phases:
        """Choose the codings of a parameter; none for dtypes that aren't real."""
        codings = make_phases(self._codec, slot.name, slot.parameter.shape)
        if codings and not slot.parameter.dtype.is_floating_point:
            self._context.announce(
                f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for "
                "real numbers"
            )
            return ()
        if codings and slot.parameter.dtype == torch.float64 and not self._has_announced_narrowing:
            self._has_announced_narrowing = True
            self._context.announce(NARROWED)
        return codings

    def set_units(self, units: Sequence[TransferUnit]) -> None:
        """Code these units from now on, without residuals."""
        self._coded_units = {(unit.server, unit.number): unit for unit in units if unit.ways}
        self._unit_indices = {key: number for number, key in enumerate(self._coded_units)}
        for residuals in (
            self._committed_residuals,
            self._stepped_residuals,
            self._pending_residuals,
        ):
            residuals.clear()
        self._sample_interval = max(
            1, sum(unit.flat.numel() for unit in self._coded_units.values()) // SAMPLE_NUMEL
        )
        if self._coded_units and self.account not in self._context.accounts:
            self._context.accounts.append(self.account)

    def measure_link(self, connections: ServerConnections, seconds: float) -> None:
        """Measure how fast the link to the servers is, if anything is coded. Collective."""
        if self._coded_units and self.account.rate is None:
            before = connections.traffic + Traffic()
            link_rate = measure_exact_rate(
                self._context.group,
                torch.device("cpu"),
                lambda x: LinkEcho(connections, x, seconds),
            )
            # Each byte of the probe travels twice, to the server and back.
            self.account.rate = ExactRate(link_rate.latency, link_rate.per_byte, 2.0)
            self._context.probe_traffic.add_sent(connections.traffic - before)

    # ---- encoding

    def encode_unit(self, unit: TransferUnit, used: bytes, *, counts: bool) -> Tensor:
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
        phase = get_phase(unit.ways, turn)
        # Start from the residual before this step, also when a unit is pushed again: the residual
        # of the first push is dropped.
        base = (
            self._stepped_residuals.get(key, self._committed_residuals.get(key)) if counts else None
        )
        self._pending_residuals.pop(key, None)
        held = None  # part of the residual that stays here, as its members are not used
        total = unit.flat if phase.coding is None else unit.flat.float()
        if base is not None:
            held = _select_unused(unit, used, base)
            total = (total + (base if held is None else base - held)).to(total.dtype)
        message, residual = total, None
        if phase.coding is not None:
            message, residual = self._encode_flat(
                phase, total, self._unit_indices[key], spare=total is not unit.flat
            )
        # Remember the new residual until the step is made. An overflow (inf, nan) leaves none,
        # or it would spoil all later steps.
        if residual is None and base is not None:
            self._pending_residuals[key] = torch.zeros_like(base) if held is None else held
        elif residual is not None and counts and is_finite(residual):
            for view, is_used in zip(unit.view_members(residual), used, strict=True):
                if not is_used:
                    view.zero_()  # the server ignores these members of the message
            self._pending_residuals[key] = residual if held is None else residual.add_(held)
        decoding = (
            self._decoding_seconds.get(self._unit_indices[key], 0.0)
            if phase.coding is not None
            else 0.0
        )
        encoding = time.thread_time() - began
        self._step_counts.pushes.append(
            PushRecord(time.perf_counter(), message.nbytes, unit.flat.nbytes, encoding, decoding)
        )
        return message

    def _encode_flat(
        self, phase: CodingPhase, flat: Tensor, index: int, *, spare: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Encode a flat tensor. Returns the message, and the residual with error feedback.

        `spare` says that `flat` isn't needed afterwards and may be overwritten.
        """
        coding, turn = phase.coding, self._context.step_state.turn
        assert coding is not None
        buffer, message = make_message(coding, flat.numel())
        coding.encode(flat, message, make_generator(turn, index, self._context.group.rank))
        # One unit in each turn is decoded here, to measure the codec's error and time.
        is_sampled = index == turn % len(self._coded_units)
        if not phase.feedback and not is_sampled:
            return buffer, None
        before = sample_elements(flat, self._sample_interval, turn)
        residual = flat if spare else flat.clone()
        began = time.thread_time()
        coding.add(message, residual, minus=True)
        self._decoding_seconds[index] = time.thread_time() - began
        if is_sampled:
            after = sample_elements(residual, self._sample_interval, turn)
            self.account.keep_sample(FinishedWork(before), before - after)
        return buffer, residual if phase.feedback else None

    # ---- residuals

    def end_pushes(self, units: Sequence[TransferUnit], *, stepped: bool) -> None:
        """End the pushes of these units. If not `stepped`, their new residuals are discarded."""
        for key in {(unit.server, unit.number) for unit in units}.intersection(
            self._pending_residuals
        ):
            residual = self._pending_residuals.pop(key)
            if stepped:
                self._stepped_residuals[key] = residual

    def commit_residuals(self) -> None:
        """Let the residuals of this turn count."""
        self._committed_residuals |= self._stepped_residuals
        self._stepped_residuals.clear()
        if self._turn_totals.exact:
            self.account.read_sample()
            self.account.add_turn(self._turn_totals)
            self._turn_totals = CodecTurn(0, 0, 0, 0, 0)

    def discard_residuals(self) -> None:
        """Discard the residuals of this turn, which has failed."""
        self._stepped_residuals.clear()
        self._pending_residuals.clear()
        self._step_counts, self._turn_totals = CodecCounts(), CodecTurn(0, 0, 0, 0, 0)

    def get_residuals(self, slots: Sequence[Slot]) -> list[Tensor | None]:
        """Residual of each slot in the shape of its parameter, or None.

        It includes the steps of the turn under way.
        """
        slot_residuals: list[Tensor | None] = [None] * len(slots)
        for key, residual in (self._committed_residuals | self._stepped_residuals).items():
            for (piece, _), view in zip(
                self._coded_units[key].members,
                self._coded_units[key].view_members(residual),
                strict=True,
            ):
                slot_residual = slot_residuals[piece.slot]
                if slot_residual is None:
                    slot_residual = slot_residuals[piece.slot] = torch.zeros_like(
                        slots[piece.slot].parameter, dtype=torch.float32, requires_grad=False
                    )
                select_rows(slot_residual, piece).copy_(view)
        return slot_residuals

    def adopt_residuals(self, worker_residuals: Sequence[Sequence[Tensor | None]]) -> None:
        """Replace this worker's residuals by the sum of the residuals of several workers.

        `worker_residuals` has for each of these workers the residual of each slot. The sum is sent
        with the next pushes.
        """
        self.discard_residuals()
        self._committed_residuals.clear()
        for key, unit in self._coded_units.items():
            slots = {piece.slot for piece, _ in unit.members}
            if any(residuals[slot] is not None for residuals in worker_residuals for slot in slots):
                self._committed_residuals[key] = torch.zeros(unit.flat.numel(), dtype=torch.float32)
                for (piece, _), view in zip(
                    unit.members, unit.view_members(self._committed_residuals[key]), strict=True
                ):
                    for slot_residual in (residuals[piece.slot] for residuals in worker_residuals):
                        if slot_residual is not None:
                            view.add_(select_rows(slot_residual, piece))

    def state_dict(self, slots: Sequence[Slot]) -> dict[str, Any]:
        """The codec and its residuals, for a checkpoint; empty without a codec."""
        return (
            {"codec": repr(self._codec), "residuals": self.get_residuals(slots)}
            if self._coded_units
            else {}
        )

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the `state_dict` of every worker, in rank order.

        There may be more or fewer workers now. The sum of all residuals stays the same.
        """
        saved_codec = next((state["codec"] for state in states if "codec" in state), None)
        own_codec, group = repr(self._codec) if self._coded_units else None, self._context.group
        if saved_codec is not None and saved_codec != own_codec:
            self._context.announce(
                f"the checkpoint was written with codec={saved_codec}, this is codec={own_codec}: "
                "its residuals are dropped"
            )
            states = []
        # Rank r takes the residuals of the saved ranks r, r + size, r + 2 size, ...
        self.adopt_residuals(
            [
                state["residuals"]
                for state in states[group.rank :: group.size]
                if "residuals" in state
            ]
        )

    # ---- whether the codec pays

    def record_wait(self, needed: float, shown: float, servers: int) -> None:
        """Account for one step, and estimate the wait without a codec.

        Servers are assumed to decode as fast as this worker.

        Args:
            needed: Reading of the performance counter when the optimizer began to wait.
            shown: Seconds that it waited.
            servers: Number of servers.
        """
        counts, self._step_counts, rate = self._step_counts, CodecCounts(), self.account.rate
        if rate is None or not counts.pushes:
            return
        # The rate is of the way there and back: a push takes half of it.
        pushes, half = counts.pushes, rate.per_byte / 2
        # A server decodes the pushes of all workers, for its part of the parameters.
        ready, each = [push.pushed_at for push in pushes], self._context.group.size / servers
        coded = exposed_seconds(
            ready,
            [
                ExchangeCost(
                    0.0, rate.latency / 2 + half * push.sent_bytes, each * push.decoding_seconds
                )
                for push in pushes
            ],
            needed,
        )
        exact = exposed_seconds(
            ready,
            [ExchangeCost(0.0, rate.latency / 2 + half * push.exact_bytes, 0.0) for push in pushes],
            needed,
        )
        encoding = sum(push.encoding_seconds for push in pushes)
        more = coded + encoding - exact  # encoding makes backward longer
        self._turn_totals.sent += sum(push.sent_bytes for push in pushes)
        self._turn_totals.exact += sum(push.exact_bytes for push in pushes)
        self._turn_totals.coding += encoding
        self._turn_totals.shown += shown
        self._turn_totals.exact_shown += max(shown - more, 0.0)


class LinkEcho:
    """An exchange that measures a link: each server gets a part of a tensor and sends it back."""

    def __init__(self, connections: ServerConnections, x: Tensor, seconds: float) -> None:
        self._seconds = seconds
        pieces = zip(connections.callers, x.tensor_split(len(connections.callers)), strict=True)
        self._echoes = [send_request(caller, Echo(piece), seconds) for caller, piece in pieces]

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the tensor is back."""
        for sent in self._echoes:
            sent.wait_for_reply(self._seconds)

    def done(self) -> bool:
        return not self._echoes

    def exception(self) -> BaseException | None:
        return None


def _select_unused(unit: TransferUnit, used: bytes, base: Tensor) -> Tensor | None:
    """Select the residuals of unused members, with zeros elsewhere; None if all are used."""
    if all(used):
        return None
    held = base.clone()
    for view, is_used in zip(unit.view_members(held), used, strict=True):
        if is_used:
            view.zero_()
    return held
