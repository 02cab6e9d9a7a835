"""Buckets that go through a codec: each bucket's codec, its state, and when new state is valid.

    all_reduce   _states ----codec----> _next_states        a sum makes a new state
    commit       _states <------------- _next_states        the turn of the loader is over
    abort                     discarded _next_states        the turn has failed

Between hosts only the leader of each host keeps state, as sums inside a host are exact.
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
    have_same_residuals,
    holds_residual,
    make_fresh_state,
    merge_states,
    pick_residuals,
    plain,
    to_codec,
)
from paceline.codec.coding import NARROWED, Coding, make_generator
from paceline.comm.bucket_layout import Bucket, BucketShape
from paceline.comm.group_protocol import Group, Traffic, Work
from paceline.comm.hierarchy.coded_all_reduce import CodedAllReduce
from paceline.sync.base import Slot
from paceline.sync.codec_auto import MIN_GAIN, ExactSteps, predict_step_seconds, try_codec
from paceline.sync.codec_cost import (
    SAMPLE_NUMEL,
    BucketTrip,
    CodecAccount,
    CodecTurn,
    ExactRate,
    ExchangeCost,
    exposed_seconds,
    measure_exact_rate,
    sample_elements,
    time_coding,
)
from paceline.sync.context import SyncContext
from paceline.sync.residual_parts import (
    BucketNames,
    convert_states,
    rebuild_states,
    split_residuals,
)

CodecOptions = tuple[Codec, ...]


class CompressedExchange:
    """The codecs of one exchange, with their states.

    The lists `_kinds`, `_codecs`, `_shapes`, `_layout` and `_states` have one entry per bucket, in
    the order of `_buckets`. An entry of `_next_states` replaces that of `_states` for the rest of
    the turn. On a worker that leads no host, all states are empty. While `_taken` is None and
    `_record` isn't, sums are exact and are being measured for `codec="auto"`.

    Making one is collective.

    Args:
        context: Groups and step of the strategy.
        codec: Codec of the gradients, or `auto`.
        hosts: Whether only leaders of hosts exchange through the codec. If False, all workers do,
            inside a host too.
    """

    def __init__(self, context: SyncContext, codec: Codec | Coding | auto, *, hosts: bool) -> None:
        self._context, self._by_hosts = context, hosts
        group = context.group
        chosen = codec.candidates if isinstance(codec, auto) else (codec,)
        self._options, self._option_names = (
            [to_codec(option) for option in chosen],
            [repr(option) for option in chosen],
        )
        # Index of the option in use. None: exact sums, until an option is chosen.
        self._option = None if isinstance(codec, auto) else 0
        self._exact_steps = ExactSteps() if isinstance(codec, auto) else None
        self._relay = CodedAllReduce(
            group if hosts else _without_hosts(group),
            max(option.stages for option in self._options),
            trace=context.trace,
        )
        context.extra_groups.append(self._relay)
        self._narrowing_announced = False  # float64 values are narrowed, which was announced
        self._buckets: Sequence[Bucket] = ()
        # Per bucket: the codec of its tensors for each option. None: always exact.
        self._codec_options: list[CodecOptions | None] = []
        self._codecs: list[Codec | None] = []  # per bucket: the codec in use; None: exact
        self._shapes: list[list[Size]] = []
        self._layout: BucketNames = []
        self._states: list[State] = []  # after the last turn that was committed
        self._next_states: dict[int, State] = {}  # by bucket, after the sums of this turn
        # By bucket: the trips that ended since the last wait.
        self._ended_trips: dict[int, BucketTrip] = {}
        self._sample_stride = 1  # the sample has one element of every `_every`
        self._counted_bytes = 0  # coded bytes sent up to the last wait
        self.account = CodecAccount(repr(codec))
        context.accounts.append(self.account)

    def choose_codecs(self, slot: Slot) -> CodecOptions | None:
        """Codec of a parameter for each option; None if the parameter is exchanged exactly.

        Dtypes that aren't real numbers always are.
        """
        if not slot.parameter.dtype.is_floating_point:
            self._context.announce(
                f"{slot.name} is {slot.parameter.dtype}: it is exchanged exactly, codecs are for "
                "real numbers"
            )
            return None
        chosen = tuple(option.choose(slot.name, slot.parameter.shape) for option in self._options)
        if all(isinstance(codec, plain) for codec in chosen):
            return None
        if slot.parameter.dtype == torch.float64 and not self._narrowing_announced:
            self._narrowing_announced = True
            self._context.announce(NARROWED)
        return chosen

    def use_buckets(
        self,
        buckets: Sequence[Bucket],
        names: Sequence[str],
        shapes: Sequence[BucketShape],
        kinds: Sequence[CodecOptions | None],
    ) -> None:
        """Exchange these buckets from now on. Collective.

        Residuals stay with their parameters.

        Args:
            buckets: The buckets. Their members are indices into the other three arguments.
            names: Names of the parameters.
            shapes: Shapes of the parameters.
            kinds: Result of `kind` for each parameter.
        """
        residuals_by_name = split_residuals(self.state_dict()["states"], self._layout)
        self._buckets = buckets
        self._codec_options = [kinds[bucket.members[0]] for bucket in buckets]
        self._shapes = [
            [Size(shapes[number].size_in_memory) for number in bucket.members] for bucket in buckets
        ]
        self._layout = [
            [[names[number], shapes[number].numel] for number in bucket.members]
            for bucket in buckets
        ]
        coded = [
            bucket.flat
            for bucket, kind in zip(buckets, self._codec_options, strict=True)
            if kind is not None
        ]
        self._sample_stride = max(1, sum(flat.numel() for flat in coded) // SAMPLE_NUMEL)
        beside = self._relay.leaders_beside
        if coded and self.account.rate is None and beside is not None:
            # A sum with `Traffic()` copies the counter, which goes on counting.
            before = beside.traffic + Traffic()
            self.account.rate = measure_exact_rate(beside, coded[0].device)
            self._context.probe_traffic.add_sent(beside.traffic - before)
        self._use_option(self._option)
        self._states = rebuild_states(self._states, self._layout, residuals_by_name)

    def _use_option(self, option: int | None) -> None:
        """Use the codecs of this option from now on, with empty states. None: exact sums."""
        self._option = option
        self._codecs, self._states = [], []
        self._next_states.clear()
        for kind, sizes, bucket in zip(
            self._codec_options, self._shapes, self._buckets, strict=True
        ):
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

    def is_coded(self, index: int) -> bool:
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

        # A generator that yields each work it waits for. The relay resumes it from its own thread,
        # so step and scale were read above.
        def sum_through_codec(
            flat_input: Tensor, groups: tuple[Group, ...]
        ) -> Generator[Work[Any], Any, Tensor]:
            wire = Wire(
                groups,
                scale=scale,
                step=step,
                draw=make_generator(step, index, self._context.group.rank, flat_input.device),
            )
            trip = BucketTrip(
                index,
                flat_input.numel(),
                given=sample_elements(flat_input, self._sample_stride, step),
            )
            coded_sum = yield from time_coding(
                codec.sum(
                    flat_input,
                    self._shapes[index],
                    self._next_states.get(index, self._states[index]),
                    wire,
                ),
                trip,
            )
            trip.total = sample_elements(coded_sum.total, self._sample_stride, step)
            self._next_states[index], self._ended_trips[index] = coded_sum.state, trip
            return coded_sum.total

        return self._relay.all_reduce(flat, sum_through_codec, name)

    @contextlib.contextmanager
    def measure_wait(self, begun: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Measure how long the block waits for buckets.

        `begun`: index of each bucket, and nanoseconds of `perf_counter_ns` at which it left.
        """
        needed = time.perf_counter()
        yield
        waited = time.perf_counter() - needed
        if self._option is None and self._exact_steps is not None:
            self._exact_steps.record_wait(
                waited,
                [
                    (index, needed - departure * 1e-9)
                    for index, departure in begun
                    if self._codec_options[index] is not None
                ],
            )
            return
        # Only leaders have trips, and only they keep an account.
        rate, beside, departures = self.account.rate, self._relay.leaders_beside, dict(begun)
        trips = [
            self._ended_trips.pop(index)
            for index in sorted(departures)
            if index in self._ended_trips
        ]
        if not trips or rate is None or beside is None:
            return
        ready, costs = (
            [departures[trip.index] * 1e-9 for trip in trips],
            [ExchangeCost(0.0, rate.predict_seconds(4 * trip.numel), 0.0) for trip in trips],
        )
        before, self._counted_bytes = self._counted_bytes, self._relay.coded_bytes
        self.account.add_turn(
            CodecTurn(
                sent=self._counted_bytes - before,
                exact=rate.sent * 4 * sum(trip.numel for trip in trips),
                coding=sum(sum(trip.coding) for trip in trips),
                shown=waited,
                exact_shown=exposed_seconds(ready, costs, needed),
            )
        )
        # The exact sum of a sample is read one turn later, so that it overlaps with the next turn.
        self.account.read_sample()
        given, total = (
            torch.cat([side for trip in trips if (side := getattr(trip, name)) is not None])
            for name in ("given", "total")
        )
        self.account.keep_sample(beside.all_reduce(given, out=given), total)

    def commit(self) -> None:
        """Keep the new states of this turn, as the turn has succeeded."""
        # A streamed bucket may arrive during this loop, on another thread. Then its state is kept
        # with the next turn: only entries seen here are deleted.
        for index in list(self._next_states):
            self._states[index] = self._next_states[index]
            del self._next_states[index]
        if self._option is None and self._exact_steps is not None and self._exact_steps.end_step():
            record = self._exact_steps
            self._context.agreement.attempt_call(lambda: self._choose_option(record))

    def _choose_option(self, record: ExactSteps) -> None:
        """Choose the option with the largest predicted gain, if it is at least GAIN. Collective."""
        # All leaders try each option on the largest coded bucket.
        largest = max(
            (n for n, kind in enumerate(self._codec_options) if kind is not None),
            key=lambda n: self._buckets[n].flat.numel(),
        )
        kind, rate, beside = (
            self._codec_options[largest],
            self.account.rate,
            self._relay.leaders_beside,
        )
        own_predictions = None
        if rate is not None and beside is not None and kind is not None:
            sizes, before = (
                [bucket.flat.numel() for bucket in self._buckets],
                beside.traffic + Traffic(),
            )
            flat, shapes = self._buckets[largest].flat.float(), self._shapes[largest]
            own_predictions = [
                predict_step_seconds(record, try_codec(codec, flat, shapes, beside), sizes, rate)
                for codec in kind
            ]
            self._context.probe_traffic.add_sent(beside.traffic - before)
        answers = [
            msgpack.unpackb(body)
            for body in self._context.agreement.meet(
                "codec", msgpack.packb([record.step_seconds, own_predictions])
            )
        ]
        self._exact_steps = None
        # A step takes as long as on the slowest worker. Workers that lead no host predict nothing.
        exact_seconds = max(seconds for seconds, _ in answers)
        predicted = [
            max(seconds)
            for seconds in zip(*(each for _, each in answers if each is not None), strict=True)
        ]
        fastest = min(range(len(predicted)), key=predicted.__getitem__)
        words = (
            f"{exact_seconds * 1e3:.0f} ms a step with exact sums, "
            f"{predicted[fastest] * 1e3:.0f} ms predicted with {self._option_names[fastest]}"
        )
        if exact_seconds < MIN_GAIN * predicted[fastest]:
            self._context.announce(f"codec: {words}, so sums stay exact")
            return
        self._context.announce_event(
            f"codec: {words}, which is taken from step {self._context.step_state.step} on"
        )
        self.account.codec = self._option_names[fastest]
        self._use_option(fastest)

    def abort(self, index: int | None = None) -> None:
        """Discard the new states of this turn: of all buckets, or of the one at `index`."""
        for bucket_index in [*self._next_states] if index is None else [index]:
            self._next_states.pop(bucket_index, None)
        self._ended_trips.clear()

    def regroup(self) -> None:
        """Continue in another group, whose hosts may have other leaders."""
        group = self._context.group
        self._relay = CodedAllReduce(
            group if self._by_hosts else _without_hosts(group),
            max(option.stages for option in self._options),
            trace=self._context.trace,
        )
        self._counted_bytes = 0
        self.account.drop_sample()
        self._context.extra_groups.append(self._relay)
        self._ended_trips.clear()

    def join_info(self) -> list[Any]:
        """The chosen codec and the rate of the link, for a worker that joins."""
        rate = self.account.rate
        return [self._option, self._exact_steps is None, None if rate is None else list(rate)]

    def load_join_info(self, layout: list[Any]) -> None:
        """Use the codec and the rate from another worker's `join_info`."""
        taken, is_chosen, rate = layout
        self._option = taken
        self._exact_steps = None if is_chosen else self._exact_steps
        if self.account.rate is None and rate is not None:
            self.account.rate = ExactRate(*rate)

    @property
    def all_states(self) -> tuple[list[State], dict[int, State]]:
        """States of all buckets, and the new states of this turn."""
        return self._states, dict(self._next_states)

    def restore_states(self, states_and_next: tuple[list[State], dict[int, State]]) -> None:
        """Restore the states in `kept`, after `regroup` and `lay_out` of the same buckets.

        New leaders begin with empty states.
        """
        old_states, next_states = states_and_next
        if self._relay.is_leader and any(old_states):
            self._states = [
                old if old else new for old, new in zip(old_states, self._states, strict=True)
            ]
            self._next_states = next_states

    def close(self) -> None:
        """End threads and groups."""
        self._context.extra_groups.remove(self._relay)
        self._relay.close()
        self._ended_trips.clear()

    # ---- state

    @property
    def states(self) -> list[State]:
        """States of all buckets, after the last turn that was committed."""
        return list(self._states)

    def state_dict(self) -> dict[str, Any]:
        """States of this worker, including those of the turn under way.

        Empty on a worker that doesn't lead its host.
        """
        states = (
            [self._next_states.get(index, state) for index, state in enumerate(self._states)]
            if self._relay.is_leader
            else []
        )
        return {"codec": self._option_name(self._option), "layout": self._layout, "states": states}

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker alone has any residuals."""
        return self._relay.is_leader and any(map(holds_residual, self._states))

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Residuals that this worker alone has; None if it has none."""
        return (
            {"residuals": [pick_residuals(state) for state in self._states]}
            if self.has_unreplicated_state
            else None
        )

    def load_unreplicated_state(self, state: dict[str, Any], stale: Container[int] = ()) -> bool:
        """Take over a lost worker's residuals, to send them later with this worker's own.

        Buckets in `stale` are left out. Returns False if the residuals don't fit.
        """
        taken_over, own = state["residuals"], [pick_residuals(state) for state in self._states]
        if not (
            self._relay.is_leader
            and len(taken_over) == len(own)
            and all(map(have_same_residuals, own, taken_over))
        ):
            return False
        for index in (index for index in range(len(taken_over)) if index not in stale):
            self._states[index] = merge_states([self._states[index], taken_over[index]])
            # Also in the state that `commit` will keep, which would overwrite the line above.
            if index in self._next_states:
                self._next_states[index] = merge_states(
                    [self._next_states[index], taken_over[index]]
                )
        return True

    def _option_name(self, option: int | None) -> str:
        return "exact" if option is None else self._option_names[option]

    def load_state_dicts(self, found: Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of every worker.

        Residuals of former leaders are dealt out to the present leaders, which send them later.
        """
        saved_states = [state["states"] for state in found if state["states"]]
        written = next((state["codec"] for state in found), self._option_name(self._option))
        if self._exact_steps is not None and written in self._option_names:
            self._exact_steps, self.account.codec = None, written  # chosen before the checkpoint
            self._use_option(self._option_names.index(written))
        if written != self._option_name(self._option):
            self._context.announce(
                f"the checkpoint was written with codec={written}, this is "
                f"codec={self._option_name(self._option)}: what that had kept is dropped"
            )
            return
        leaders = self._relay.leaders
        if leaders is None or not saved_states:
            return
        saved_states, dropped = convert_states(
            saved_states, found[0].get("layout", self._layout), self._states, self._layout
        )
        if dropped:
            self._context.announce(
                f"the codec's residual of the gradient of {dropped} is dropped: "
                "it is not exchanged here"
            )
        # Leader i gets the former leaders i, i + size, ... If there are more leaders now, some
        # begin with empty states.
        own_states = saved_states[leaders.rank :: leaders.size] or [
            [make_fresh_state(state) for state in saved_states[0]]
        ]
        self._states = [merge_states(states) for states in zip(*own_states, strict=True)]
        self._next_states.clear()


def _without_hosts(group: Group) -> Group:
    """Group of all workers that doesn't distinguish hosts."""
    return getattr(group, "flat", group)
