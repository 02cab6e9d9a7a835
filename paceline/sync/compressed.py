"""Buckets that travel through a codec: the codec of each, its state, and when new state counts.

A codec's state changes with every sum. The new state counts when the turn of the loader is over
(`commit`), and is discarded if the turn failed (`abort`). Between hosts only the leader of a host
has state: inside the host sums are exact.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container, Generator, Iterator, Sequence
from typing import Any

import msgpack
import torch
from torch import Size, Tensor

from paceline.codec.auto import auto
from paceline.codec.codec import (
    Codec,
    State,
    Wire,
    alike,
    fresh,
    keeps,
    lift,
    merge,
    plain,
    residuals,
)
from paceline.codec.coding import NARROWED, Coding, seeded
from paceline.comm.bucket_layout import Bucket, BucketShape
from paceline.comm.group_protocol import Group, Traffic, Work
from paceline.comm.hierarchy.coded_all_reduce import CodedAllReduce
from paceline.sync.base import Slot
from paceline.sync.codec_auto import GAIN, ExactSteps, attempt, predict
from paceline.sync.codec_cost import (
    SAMPLE,
    BucketTrip,
    CodecAccount,
    CodecTurn,
    ExactRate,
    ExchangeCost,
    exposed,
    measure,
    sampled,
    timed,
)
from paceline.sync.context import SyncContext
from paceline.sync.residual_parts import Layout, adopted, parted, relaid

Kind = tuple[Codec, ...]


class CompressedExchange:
    """The codecs of one exchange.

    Collective. With `hosts=False` every worker is behind the codec, also inside a host.
    """

    def __init__(self, context: SyncContext, codec: Codec | Coding | auto, *, hosts: bool) -> None:
        self._context, self._hosts = context, hosts
        group = context.group
        chosen = codec.candidates if isinstance(codec, auto) else (codec,)
        self._options, self._names = (
            [lift(option) for option in chosen],
            [repr(option) for option in chosen],
        )
        # index of the option in use; None: exact sums, until one is chosen
        self._taken = None if isinstance(codec, auto) else 0
        self._record = ExactSteps() if isinstance(codec, auto) else None
        self._relay = CodedAllReduce(
            group if hosts else _flat(group),
            max(option.stages for option in self._options),
            trace=context.trace,
        )
        context.extra_groups.append(self._relay)
        self._narrowed = False  # whether it was said that float64 values are narrowed
        self._buckets: Sequence[Bucket] = ()
        # of each bucket: the codecs of its tensors, by option; None: exact
        self._kinds: list[Kind | None] = []
        self._codecs: list[Codec | None] = []  # of each bucket, as of now
        self._shapes: list[list[Size]] = []
        self._layout: Layout = []
        self._states: list[State] = []  # as of the last turn that counted
        self._next: dict[int, State] = {}  # of this turn
        # of the buckets that have arrived since the last wait
        self._trips: dict[int, BucketTrip] = {}
        self._every = 1  # one element in so many is sampled
        self._crossed = 0
        self.account = CodecAccount(repr(codec))
        context.accounts.append(self.account)

    def kind(self, slot: Slot) -> Kind | None:
        """Codecs for a parameter; None if it is exchanged exactly, as all but real numbers are."""
        if not slot.parameter.dtype.is_floating_point:
            self._context.announce(
                f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for "
                "real numbers"
            )
            return None
        chosen = tuple(option.choose(slot.name, slot.parameter.shape) for option in self._options)
        if all(isinstance(codec, plain) for codec in chosen):
            return None
        if slot.parameter.dtype == torch.float64 and not self._narrowed:
            self._narrowed = True
            self._context.announce(NARROWED)
        return chosen

    def lay_out(
        self,
        buckets: Sequence[Bucket],
        names: Sequence[str],
        shapes: Sequence[BucketShape],
        kinds: Sequence[Kind | None],
    ) -> None:
        """Exchange these buckets from now on, of parameters with these names, shapes and kinds.

        Residuals stay with them. Collective.
        """
        kept = parted(self.state_dict()["states"], self._layout)
        self._buckets = buckets
        self._kinds = [kinds[bucket.members[0]] for bucket in buckets]
        self._shapes = [
            [Size(shapes[number].size_in_memory) for number in bucket.members] for bucket in buckets
        ]
        self._layout = [
            [[names[number], shapes[number].numel] for number in bucket.members]
            for bucket in buckets
        ]
        coded = [
            bucket.flat
            for bucket, kind in zip(buckets, self._kinds, strict=True)
            if kind is not None
        ]
        self._every = max(1, sum(flat.numel() for flat in coded) // SAMPLE)
        beside = self._relay.leaders_beside
        if coded and self.account.rate is None and beside is not None:
            before = beside.traffic + Traffic()
            self.account.rate = measure(beside, coded[0].device)
            self._context.probe_traffic.add_sent(beside.traffic - before)
        self._take(self._taken)
        self._states = relaid(self._states, self._layout, kept)

    def _take(self, option: int | None) -> None:
        """Code by this option from now on, with empty states."""
        self._taken = option
        self._codecs, self._states = [], []
        self._next.clear()
        for kind, sizes, bucket in zip(self._kinds, self._shapes, self._buckets, strict=True):
            codec = (
                None
                if kind is None or option is None or isinstance(kind[option], plain)
                else kind[option]
            )
            self._codecs.append(codec)
            self._states.append(
                codec.init(sizes, bucket.flat.device)
                if codec is not None and self._relay.is_leader
                else {}
            )

    def takes(self, index: int) -> bool:
        """Whether a bucket goes through a codec."""
        return self._codecs[index] is not None

    def all_reduce(self, index: int, flat: Tensor, name: str) -> Work[Tensor]:
        """Start summing a bucket in place."""
        codec, step, scale = (
            self._codecs[index],
            self._context.step_state.step,
            self._context.step_state.loss_scale(),
        )
        assert codec is not None

        def way(x: Tensor, groups: tuple[Group, ...]) -> Generator[Work[Any], Any, Tensor]:
            wire = Wire(
                groups,
                scale=scale,
                step=step,
                draw=seeded(step, index, self._context.group.rank, x.device),
            )
            trip = BucketTrip(index, x.numel(), given=sampled(x, self._every, step))
            found = yield from timed(
                codec.sum(x, self._shapes[index], self._next.get(index, self._states[index]), wire),
                trip,
            )
            trip.total = sampled(found.total, self._every, step)
            self._next[index], self._trips[index] = found.state, trip
            return found.total

        return self._relay.all_reduce(flat, way, name)

    @contextlib.contextmanager
    def awaited(self, begun: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Measure the wait for buckets inside of the block.

        `begun`: (index, when it left in ns of the performance counter) of each.
        """
        needed = time.perf_counter()
        yield
        shown = time.perf_counter() - needed
        if self._taken is None and self._record is not None:
            self._record.exchanged(
                shown,
                [
                    (index, needed - when * 1e-9)
                    for index, when in begun
                    if self._kinds[index] is not None
                ],
            )
            return
        rate, beside, left = self.account.rate, self._relay.leaders_beside, dict(begun)
        trips = [self._trips.pop(index) for index in sorted(left) if index in self._trips]
        if not trips or rate is None or beside is None:
            return
        ready, costs = (
            [left[trip.index] * 1e-9 for trip in trips],
            [ExchangeCost(0.0, rate.seconds(4 * trip.numel), 0.0) for trip in trips],
        )
        before, self._crossed = self._crossed, self._relay.coded_bytes
        self.account.add(
            CodecTurn(
                sent=self._crossed - before,
                exact=rate.sent * 4 * sum(trip.numel for trip in trips),
                coding=sum(sum(trip.coding) for trip in trips),
                shown=shown,
                exact_shown=exposed(ready, costs, needed),
            )
        )
        self.account.settle()
        given, total = (
            torch.cat([side for trip in trips if (side := getattr(trip, name)) is not None])
            for name in ("given", "total")
        )
        self.account.compare(beside.all_reduce(given, out=given), total)

    def commit(self) -> None:
        """Let the states of this turn count.

        A bucket still under way (streaming) may arrive meanwhile, and counts with the next turn.
        """
        for index in list(self._next):
            self._states[index] = self._next[index]
            del self._next[index]
        if self._taken is None and self._record is not None and self._record.over():
            record = self._record
            self._context.agreement.attempt_call(lambda: self._choose(record))

    def _choose(self, record: ExactSteps) -> None:
        """Choose the option with the largest predicted gain, if that is enough. Collective."""
        largest = max(
            (n for n, kind in enumerate(self._kinds) if kind is not None),
            key=lambda n: self._buckets[n].flat.numel(),
        )
        kind, rate, beside = self._kinds[largest], self.account.rate, self._relay.leaders_beside
        mine = None
        if rate is not None and beside is not None and kind is not None:
            sizes, before = (
                [bucket.flat.numel() for bucket in self._buckets],
                beside.traffic + Traffic(),
            )
            flat, shapes = self._buckets[largest].flat.float(), self._shapes[largest]
            mine = [
                predict(record, attempt(codec, flat, shapes, beside), sizes, rate) for codec in kind
            ]
            self._context.probe_traffic.add_sent(beside.traffic - before)
        found = [
            msgpack.unpackb(body)
            for body in self._context.agreement.meet("codec", msgpack.packb([record.step, mine]))
        ]
        self._record = None
        now = max(step for step, _ in found)
        promised = [
            max(step)
            for step in zip(*(steps for _, steps in found if steps is not None), strict=True)
        ]
        best = min(range(len(promised)), key=promised.__getitem__)
        times = (
            f"{now * 1e3:.0f} ms a step with exact sums, {promised[best] * 1e3:.0f} ms predicted "
            f"with {self._names[best]}"
        )
        if now < GAIN * promised[best]:
            self._context.announce(f"codec: {times}, so sums stay exact")
            return
        self._context.tell(
            f"codec: {times}, which is taken from step {self._context.step_state.step} on"
        )
        self.account.codec = self._names[best]
        self._take(best)

    def abort(self, index: int | None = None) -> None:
        """Discard new states of the step under way: of all buckets, or of the one at `index`."""
        for number in [*self._next] if index is None else [index]:
            self._next.pop(number, None)
        self._trips.clear()

    def regroup(self) -> None:
        """Go on in another group, perhaps with other leaders."""
        group = self._context.group
        self._relay = CodedAllReduce(
            group if self._hosts else _flat(group),
            max(option.stages for option in self._options),
            trace=self._context.trace,
        )
        self._crossed = 0
        self.account.forget()
        self._context.extra_groups.append(self._relay)
        self._trips.clear()

    def join_info(self) -> list[Any]:
        """The chosen codec and the rate of the link, for a worker that joins."""
        rate = self.account.rate
        return [self._taken, self._record is None, None if rate is None else list(rate)]

    def follow(self, layout: list[Any]) -> None:
        """Go on with the codec and the rate of `join_info`."""
        taken, chosen, rate = layout
        self._taken = taken
        self._record = None if chosen else self._record
        if self.account.rate is None and rate is not None:
            self.account.rate = ExactRate(*rate)

    @property
    def kept(self) -> tuple[list[State], dict[int, State]]:
        """States of all buckets, and the new ones of this turn."""
        return self._states, dict(self._next)

    def keep(self, found: tuple[list[State], dict[int, State]]) -> None:
        """Go on with states that were kept, after `regroup` and `lay_out` of the same buckets.

        New leaders begin with empty ones.
        """
        states, following = found
        if self._relay.is_leader and any(states):
            self._states = [
                mine if mine else new for mine, new in zip(states, self._states, strict=True)
            ]
            self._next = following

    def close(self) -> None:
        """End threads and groups."""
        self._context.extra_groups.remove(self._relay)
        self._relay.close()
        self._trips.clear()

    # ---- state

    @property
    def states(self) -> list[State]:
        """States of all buckets, as of the last turn that counted."""
        return list(self._states)

    def state_dict(self) -> dict[str, Any]:
        """States here, with new ones of the turn under way; empty if another worker leads this
        host.
        """
        states = (
            [self._next.get(index, state) for index, state in enumerate(self._states)]
            if self._relay.is_leader
            else []
        )
        return {"codec": self._name(self._taken), "layout": self._layout, "states": states}

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker alone has any residuals."""
        return self._relay.is_leader and any(map(keeps, self._states))

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Return the residuals that this worker alone has, or None if the codec keeps none."""
        return (
            {"residuals": [residuals(state) for state in self._states]}
            if self.has_unreplicated_state
            else None
        )

    def load_unreplicated_state(self, state: dict[str, Any], stale: Container[int] = ()) -> bool:
        """Take over a lost worker's residuals, to send them later with this worker's own.

        `stale` buckets are left out. Returns False if the residuals don't fit.
        """
        found, mine = state["residuals"], [residuals(state) for state in self._states]
        if not self._relay.is_leader or len(found) != len(mine) or not all(map(alike, mine, found)):
            return False
        for index in (index for index in range(len(found)) if index not in stale):
            self._states[index] = merge([self._states[index], found[index]])
            if index in self._next:
                self._next[index] = merge([self._next[index], found[index]])
        return True

    def _name(self, option: int | None) -> str:
        return "exact" if option is None else self._names[option]

    def load_state_dicts(self, found: Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of every worker.

        A leader later sends the residuals of one former leader, or of several.
        """
        kept = [state["states"] for state in found if state["states"]]
        written = next((state["codec"] for state in found), self._name(self._taken))
        if self._record is not None and written in self._names:
            self._record, self.account.codec = None, written  # chosen before the checkpoint
            self._take(self._names.index(written))
        if written != self._name(self._taken):
            self._context.announce(
                f"the checkpoint was written with codec={written}, this is "
                f"codec={self._name(self._taken)}: what that had kept is dropped"
            )
            return
        place = self._relay.leaders
        if place is None or not kept:
            return
        kept, gone = adopted(kept, found[0].get("layout", self._layout), self._states, self._layout)
        if gone:
            self._context.announce(
                f"what a codec had kept of the gradient of {gone} is dropped: "
                "it is not exchanged here"
            )
        mine = kept[place.rank :: place.size] or [[fresh(state) for state in kept[0]]]
        self._states = [merge(states) for states in zip(*mine, strict=True)]
        self._next.clear()


def _flat(group: Group) -> Group:
    """Return the group of all workers without regard to hosts."""
    return getattr(group, "flat", group)
