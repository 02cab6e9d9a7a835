"""Simulates a step of data parallelism on a virtual clock: who computes, sums, sends and waits.

worker 0   forward | backward ......x.......x......x | wait   | optimizer
             bucket 0:   |sum|-- link --|out|
             bucket 1:          |sum|-- link --|out|
worker 1   forward | backward .....x.....x......x    | wait   | optimizer

Buckets go in their order through three stages: the sum inside each host, the link between hosts,
and the hand-out inside each host. A stage has one bucket at a time. On a host without an idle core
the processor time of an exchange delays backward (x) by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch

from paceline.comm.bucket_layout import BucketShape, cut_runs
from paceline.comm.schedule import (
    LinkSpeed,
    Schedule,
    ScheduleNetwork,
    build_owners,
    choose_even_schedule,
    predict_seconds,
)
from paceline.planner import exchange_cost as cost
from paceline.planner.exchange_cost import EXACT, WireCodec
from paceline.planner.model_profile import GradientProfile, StepTimes
from paceline.planner.planned_cluster import PlannedCluster

FIRST_BUCKET, BUCKET = 1_000_000, 8_000_000  # bytes, as AllReduce has them
AGREEING_TRIPS: Final = 1.5  # ways over the slowest link until workers have agreed
MEMORY: Final = LinkSpeed(10e-6, 1e10)  # between workers of a host


class BucketLoad(NamedTuple):
    """A bucket: its bytes, and when it is full, as a fraction of backward."""

    nbytes: float
    moment: float


class GradientLoad(NamedTuple):
    """The gradients of a model: the number of its parameters, and their buckets in order."""

    parameters: int
    buckets: tuple[BucketLoad, ...]


class WorkerLoad(NamedTuple):
    """A worker: times of its share without an exchange, and bytes it reads and writes a second."""

    times: StepTimes
    copy_rate: float


class Event(NamedTuple):
    """Something that takes time: on a worker, or on a link. Seconds from the begin of the step."""

    lane: str
    name: str
    start: float
    end: float


class ExchangePrice(NamedTuple):
    """What an exchange takes: seconds, and bytes sent within and between hosts."""

    seconds: float
    within_bytes: float
    between_bytes: float


@dataclass(frozen=True)
class SimulatedStep:
    """One step of all workers.

    Attributes:
        seconds: Seconds of the step, the mean over a round of local SGD.
        parts: Where they go on the slowest way: seconds by name. They add up to `seconds`.
        within_bytes: Bytes sent inside hosts, of all workers together.
        between_bytes: Bytes sent between hosts.
        events: What happened when.
    """

    seconds: float
    parts: dict[str, float]
    within_bytes: float
    between_bytes: float
    events: tuple[Event, ...] = field(default=(), repr=False)


def lay_out_buckets(gradients: Sequence[GradientProfile]) -> GradientLoad:
    """Lay gradients out in the buckets that AllReduce would make of them."""
    device = torch.device("cpu")
    shapes = [
        BucketShape((each.numel,), (1,), getattr(torch, each.dtype), device) for each in gradients
    ]
    runs = cut_runs(shapes, range(len(shapes)), BUCKET, FIRST_BUCKET)
    buckets = [
        BucketLoad(
            float(sum(shapes[index].padded_numel * shapes[index].dtype.itemsize for index in run)),
            max(gradients[index].moment for index in run),
        )
        for run in runs
    ]
    return GradientLoad(len(gradients), tuple(buckets))


@dataclass(frozen=True)
class ExchangeRoute:
    """How buckets travel.

    Attributes:
        schedule: Schedule of the hosts' leaders. None: there is only one host.
        network: What the schedule is priced on.
        codec: How gradients are written between hosts.
    """

    schedule: Schedule | None
    network: ScheduleNetwork
    codec: WireCodec = EXACT

    def link_seconds(self, nbytes: float) -> float:
        """Seconds that a bucket occupies the links."""
        if self.schedule is None:
            return 0.0
        coded = nbytes / self.codec.ratio
        return predict_seconds(self.schedule, round(coded), self.network)

    def crossing_bytes(self, nbytes: float) -> float:
        """Bytes that all hosts together send to other hosts for a bucket."""
        if self.schedule is None:
            return 0.0
        hosts = self.network.hosts
        fractions = sum(
            self.schedule.chunks[move.chunk]
            for moves in self.schedule.rounds
            for move in moves
            if hosts[move.src] != hosts[move.dst]
        )
        return fractions * nbytes / self.codec.ratio


def choose_exchange(cluster: PlannedCluster, codec: WireCodec = EXACT) -> ExchangeRoute:
    """Choose the route that AllReduce takes without a measured cluster: one copy per host."""
    links = [
        LinkSpeed(
            max(host.up.latency_seconds, host.down.latency_seconds),
            min(host.up.bytes_per_second, host.down.bytes_per_second),
        )
        for host in cluster.hosts
    ]
    count = len(links)
    if count < 2:
        return ExchangeRoute(None, ScheduleNetwork((0,), MEMORY, MEMORY), codec)
    network = ScheduleNetwork(range(count), MEMORY, links[0], links)
    # A codec's sums go straight to the owner of a chunk, and back.
    schedule = build_owners(count) if codec.name else choose_even_schedule(BUCKET, network)[0]
    return ExchangeRoute(schedule, network, codec)


def simulate_step(
    cluster: PlannedCluster,
    workers: Sequence[WorkerLoad],
    gradients: GradientLoad,
    route: ExchangeRoute,
    *,
    every: int = 1,
    sharded: bool = False,
) -> SimulatedStep:
    """Simulate a step.

    Args:
        cluster: The hosts, and their workers.
        workers: Load of each worker.
        gradients: What is exchanged.
        route: How buckets travel.
        every: Steps between two exchanges: 1 exchanges gradients during backward. With more,
            workers step on their own and exchange their changes then (local SGD).
        sharded: Whether each worker gets the sum of its part of the gradients, steps that part, and
            then gathers all parameters (ZeRO 1 and 2).
    """
    if sharded:
        workers = [_step_part(worker, cluster.workers) for worker in workers]
    state = _Clock(cluster, workers, gradients, route, sharded=sharded)
    if cluster.workers == 1:
        return state.finish([state.computed[0]], 0.0)
    if every == 1:
        done = state.exchange_during_backward()
        fixed = cost.STEP_SECONDS + state.agreement_seconds()
        return state.finish(done, fixed + (state.gather_seconds() if sharded else 0.0))
    own = state.finish(state.computed, cost.STEP_SECONDS)
    return _add_round(own, state, every)


def _step_part(worker: WorkerLoad, count: int) -> WorkerLoad:
    """Let a worker step its part of the parameters only."""
    return worker._replace(times=replace(worker.times, optimizer=worker.times.optimizer / count))


class _Clock:
    """The virtual clock of one step: when each worker computes, and when each stage is free."""

    def __init__(
        self,
        cluster: PlannedCluster,
        workers: Sequence[WorkerLoad],
        gradients: GradientLoad,
        route: ExchangeRoute,
        *,
        sharded: bool = False,
    ) -> None:
        self.cluster, self.gradients, self.route = cluster, gradients, route
        self.sharded = sharded
        self.times = [worker.times for worker in workers]
        self.copy_rates = [worker.copy_rate for worker in workers]
        self.host_of = cluster.host_of_workers()
        self.workers_of = [
            [worker for worker, host in enumerate(self.host_of) if host == index]
            for index in range(len(cluster.hosts))
        ]
        self.has_idle_core = [has_idle_core(cluster, index) for index in range(len(cluster.hosts))]
        self.began = [each.data + each.forward for each in self.times]
        self.delay = [0.0] * len(workers)  # of backward, by exchanges
        self.events: list[Event] = []
        self.within = self.between = 0.0

    @property
    def computed(self) -> list[float]:
        """When each worker's backward ends without any exchange."""
        return [began + each.backward for began, each in zip(self.began, self.times, strict=True)]

    def exchange_during_backward(self) -> list[float]:
        """Send all buckets through the stages. Returns when each worker has all results."""
        times, hosts = self.times, range(len(self.cluster.hosts))
        inside_free, out_free, link_free = [0.0] * len(hosts), [0.0] * len(hosts), 0.0
        buckets = self.gradients.buckets
        total = sum(bucket.nbytes for bucket in buckets) or 1.0
        for index, bucket in enumerate(buckets):
            # Gradients are scaled into the bucket, between the layers of backward.
            for worker, rate in enumerate(self.copy_rates):
                hooks = self.gradients.parameters * cost.GRADIENT_SECONDS * bucket.nbytes / total
                self.delay[worker] += hooks + cost.SCALE_TRAFFIC * bucket.nbytes / rate
            ready = [
                began + bucket.moment * each.backward + delay
                for began, each, delay in zip(self.began, times, self.delay, strict=True)
            ]
            summed = self._sum_inside(index, bucket.nbytes, ready, inside_free)
            crossed = link_free = self._cross_link(index, bucket.nbytes, summed, link_free)
            self._hand_out(index, bucket.nbytes, crossed, out_free)
        return [
            max(out_free[host], inside_free[host], computed + delay)
            for host, computed, delay in zip(self.host_of, self.computed, self.delay, strict=True)
        ]

    def _sum_inside(
        self, index: int, nbytes: float, ready: Sequence[float], free: list[float]
    ) -> list[float]:
        """Sum a bucket inside each host. Returns when each host's sum is there."""
        ends = []
        for host, workers in enumerate(self.workers_of):
            start = max(free[host], *(ready[worker] for worker in workers))
            if len(workers) > 1:
                slowest = min(self.copy_rates[worker] for worker in workers)
                # A worker that keeps only its part of the sum writes less.
                traffic = 1.0 + 1.0 / len(workers) if self.sharded else cost.SUM_TRAFFIC
                seconds = cost.BUCKET_SECONDS + traffic * nbytes / slowest
                self._note(host, f"sum {index}", start, seconds)
                self._delay_backward(host, workers, seconds)
                self.within += nbytes * (len(workers) - 1)
                start += seconds
            free[host] = start
            ends.append(start)
        return ends

    def _cross_link(self, index: int, nbytes: float, summed: Sequence[float], free: float) -> float:
        """Exchange a bucket between hosts. Returns when all hosts have the result."""
        start = max(free, *summed)
        hosts = len(self.workers_of)
        if hosts == 1:
            return start
        # The first half of an all-reduce sums, the second one gathers.
        part = 0.5 if self.sharded else 1.0
        sent = part * self.route.crossing_bytes(nbytes)
        self.between += sent
        for host, workers in enumerate(self.workers_of):
            # Each host sends and receives its part of all traffic.
            processor = cost.CROSSING_SECONDS + 2 * sent / hosts * cost.WIRE_SECONDS
            processor += self.route.codec.seconds_per_byte * nbytes
            self._delay_backward(host, workers[:1], processor)
        coding = self.route.codec.seconds_per_byte * nbytes
        seconds = part * self.route.link_seconds(nbytes) + coding + cost.CROSSING_SECONDS
        self.events.append(Event("link", f"bucket {index}", start, start + seconds))
        return start + seconds

    def _hand_out(self, index: int, nbytes: float, crossed: float, free: list[float]) -> None:
        """Hand the result out to the workers of each host that don't lead it."""
        for host, workers in enumerate(self.workers_of):
            start = max(free[host], crossed)
            several = len(workers) > 1 and len(self.workers_of) > 1
            if several and not self.sharded:
                slowest = min(self.copy_rates[worker] for worker in workers)
                seconds = cost.BUCKET_SECONDS + cost.HAND_OUT_TRAFFIC * nbytes / slowest
                self._note(host, f"hand out {index}", start, seconds)
                self._delay_backward(host, workers, seconds)
                start += seconds
            free[host] = start

    def _note(self, host: int, name: str, start: float, seconds: float) -> None:
        for worker in self.workers_of[host]:
            self.events.append(Event(f"worker {worker} exchange", name, start, start + seconds))

    def _delay_backward(self, host: int, workers: Sequence[int], seconds: float) -> None:
        """Take processor time from workers that still compute, if their host has no idle core."""
        if not self.has_idle_core[host]:
            for worker in workers:
                self.delay[worker] += seconds

    def gather_seconds(self) -> float:
        """Seconds in which workers gather all parameters, after each has stepped its part."""
        seconds = cost.SHARD_SECONDS
        for bucket in self.gradients.buckets:
            gather = price_gather(self.cluster, self.copy_rates, bucket.nbytes, self.route)
            seconds += gather.seconds
            self.within += gather.within_bytes
            self.between += gather.between_bytes
        return seconds

    def agreement_seconds(self) -> float:
        """Seconds in which workers of several hosts agree at the end of backward."""
        links = self.route.network.links
        return AGREEING_TRIPS * max((link.latency_seconds for link in links), default=0.0)

    def finish(self, done: Sequence[float], fixed: float) -> SimulatedStep:
        """End the step: the optimizers step, and what is left is done."""
        ends = [
            end + fixed + each.optimizer + each.other
            for end, each in zip(done, self.times, strict=True)
        ]
        # Workers meet in each step, so the slowest decides.
        slowest = max(range(len(ends)), key=ends.__getitem__)
        each, seconds = self.times[slowest], ends[slowest]
        # What a cut exchanges is a part of forward and backward.
        computing = 1.0 - each.exchange / ((each.forward + each.backward) or 1.0)
        parts = {
            "data": each.data,
            "forward": each.forward * computing,
            "backward": each.backward * computing,
            "exchange": seconds - each.seconds + each.exchange,
            "optimizer": each.optimizer,
            "other": each.other,
        }
        for worker, own in enumerate(self.times):
            lane, begin = f"worker {worker}", 0.0
            computed = self.began[worker] + own.backward + self.delay[worker]
            for name, end in (
                ("data", own.data),
                ("forward", self.began[worker]),
                ("backward", computed),
                ("wait", max(done[worker], computed) + fixed),
                ("optimizer", max(done[worker], computed) + fixed + own.optimizer),
            ):
                if end > begin:
                    self.events.append(Event(lane, name, begin, end))
                begin = end
        events = tuple(sorted(self.events, key=lambda event: (event.lane, event.start)))
        return SimulatedStep(seconds, parts, self.within, self.between, events)


def has_idle_core(cluster: PlannedCluster, index: int) -> bool:
    """Whether a host has a core for exchanges besides those that compute."""
    host = cluster.hosts[index]
    idle = host.cores * (1.0 - cluster.machine_load(index)) >= 1.0
    return idle and (host.quota is None or host.quota - host.workers * host.threads >= 1.0)


def price_gather(
    cluster: PlannedCluster, copy_rates: Sequence[float], nbytes: float, route: ExchangeRoute
) -> ExchangePrice:
    """Price gathering a tensor of which each worker has a part.

    Args:
        cluster: The hosts, and their workers.
        copy_rates: Bytes that each worker reads and writes a second.
        nbytes: Bytes of the whole tensor.
        route: How tensors travel between hosts.
    """
    count, hosts = cluster.workers, len(cluster.hosts)
    seconds = cost.BUCKET_SECONDS + cost.GATHER_TRAFFIC * nbytes / min(copy_rates)
    within = nbytes * (count - hosts) / count
    if hosts == 1:
        return ExchangePrice(seconds, within, 0.0)
    seconds += route.link_seconds(nbytes) / 2 + cost.CROSSING_SECONDS
    return ExchangePrice(seconds, within, route.crossing_bytes(nbytes) / 2)


def simulate_bare_exchange(
    cluster: PlannedCluster,
    copy_rates: Sequence[float],
    gradients: GradientLoad,
    route: ExchangeRoute,
    *,
    sharded: bool = False,
) -> ExchangePrice:
    """Simulate an exchange that no backward hides, as all tensors are there at once.

    Args:
        cluster: The hosts, and their workers.
        copy_rates: Bytes that each worker reads and writes a second.
        gradients: What is exchanged.
        route: How buckets travel.
        sharded: Whether each worker gets its part of the sum only.
    """
    idle = StepTimes(1, 0.0, 0.0, 0.0, 0.0, 0.0)
    loads = [WorkerLoad(idle, rate) for rate in copy_rates]
    clock = _Clock(cluster, loads, gradients, route, sharded=sharded)
    seconds = max(clock.exchange_during_backward()) + clock.agreement_seconds()
    return ExchangePrice(seconds, clock.within, clock.between)


def _add_round(own: SimulatedStep, state: _Clock, every: int) -> SimulatedStep:
    """Add the exchange of a round of local SGD, spread over its steps."""
    total = sum(bucket.nbytes for bucket in state.gradients.buckets)
    seconds, within, between = simulate_bare_exchange(
        state.cluster, state.copy_rates, state.gradients, state.route
    )
    seconds += cost.ROUND_TRAFFIC * total / min(state.copy_rates)
    return SimulatedStep(
        own.seconds + seconds / every,
        {**own.parts, "exchange": own.parts["exchange"] + seconds / every},
        within / every,
        between / every,
        own.events,
    )
