"""Simulates servers that fail, event by event, with checkpoints, repairs and stalls.

    time      ----x------------------------x--------o------->
    servers   fail                     fail        one comes back
    training  T T C T | stall | T T T C T T | stall | T C T      T work, C checkpoint
                    ^ lost if it restarts

It has no limit on how often servers fail, knows servers that fail together, and replays traces.
The rules are those of `paceline.planner.budgets.goodput`. A failure during a stall begins it anew.
Nothing here is random but what a seed decides.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.planner.budgets.failures import Failures, FailureTrace
from paceline.planner.budgets.goodput import (
    Division,
    FailureResponse,
    ServerTime,
    can_shrink,
    check_conserved,
)


class Breakage(NamedTuple):
    """Servers that break at the same moment, and how long they are away (seconds)."""

    time: float
    servers: Sequence[int]
    away: float


@dataclass(frozen=True)
class SimulatedRun:
    """What one simulated run did.

    Attributes:
        seconds: Length of the run.
        samples: Samples that count at its end.
        most_samples: Most samples that counted at any time.
        time: Seconds of all servers, by what they did.
        failures: Failures of servers that trained.
        restarts: Failures after which all restarted from a checkpoint.
    """

    seconds: float
    samples: float
    most_samples: float
    time: ServerTime
    failures: int
    restarts: int


def simulate_run(
    division: Division,
    failures: Failures,
    response: FailureResponse,
    samples_per_second: Callable[[int], float],
    *,
    period: float,
    seconds: float,
    seed: int,
) -> SimulatedRun:
    """Simulate one run.

    Args:
        division: Servers that train and stand by, and copies of the state.
        failures: How servers fail.
        response: What the job does when a server fails.
        samples_per_second: Samples per second of a number of servers that train, without failures.
        period: Seconds of training between two checkpoints.
        seconds: Length of the run.
        seed: Seed of everything that is random.
    """
    chance = random.Random(seed)
    servers = division.servers
    if failures.trace is None:
        breakages = draw_breakages(failures, servers, response.replace, chance)
    else:
        breakages = replay_trace(failures.trace, servers, chance)
    return follow_breakages(
        breakages,
        division,
        response,
        samples_per_second,
        period=period,
        seconds=seconds,
        together=failures.together,
    )


def follow_breakages(
    breakages: Iterable[Breakage],
    division: Division,
    response: FailureResponse,
    samples_per_second: Callable[[int], float],
    *,
    period: float,
    seconds: float,
    together: int = 1,
) -> SimulatedRun:
    """Simulate a run in which servers break at given moments.

    Args:
        breakages: When servers break, in the order of time. Servers are counted from 0; those that
            train at the beginning come first.
        division: Servers that train and stand by, and copies of the state.
        response: What the job does when a server fails.
        samples_per_second: Samples per second of a number of servers that train, without failures.
        period: Seconds of training between two checkpoints.
        seconds: Length of the run.
        together: Servers that fail at the same moment. Default: 1.
    """
    run = _RunState(division, response, samples_per_second, period, together)
    returns: list[tuple[float, int]] = []
    for breakage in itertools.chain(breakages, [Breakage(math.inf, (), 0.0)]):
        # Servers that come back before this moment.
        while returns and returns[0][0] <= min(breakage.time, seconds):
            moment, server = heapq.heappop(returns)
            run.advance(moment)
            run.take_back(server)
        if breakage.time >= seconds:
            break
        run.advance(breakage.time)
        broken = run.break_servers(breakage.servers, returns=breakage.away > 0)
        for server in broken:
            heapq.heappush(returns, (breakage.time + breakage.away, server))
    run.advance(seconds)
    return run.finish()


def simulate_runs(
    division: Division,
    failures: Failures,
    response: FailureResponse,
    samples_per_second: Callable[[int], float],
    *,
    period: float,
    seconds: float,
    seeds: Sequence[int],
) -> list[SimulatedRun]:
    """Simulate a run with each seed. Arguments are those of `simulate_run`."""
    return [
        simulate_run(
            division,
            failures,
            response,
            samples_per_second,
            period=period,
            seconds=seconds,
            seed=seed,
        )
        for seed in seeds
    ]


# ---- failures


def draw_breakages(
    failures: Failures, servers: int, away: float, chance: random.Random
) -> Iterator[Breakage]:
    """Draw failures of groups of servers at random moments, without end.

    Args:
        failures: Rate of a server, and number of servers that fail together.
        servers: Number of servers.
        away: Seconds until a broken server is replaced.
        chance: Source of random numbers.
    """
    groups = math.ceil(servers / failures.together)
    moment = 0.0
    while failures.rate > 0:
        moment += chance.expovariate(failures.rate * groups)
        first = chance.randrange(groups) * failures.together
        yield Breakage(moment, range(first, min(first + failures.together, servers)), away)


def replay_trace(trace: FailureTrace, servers: int, chance: random.Random) -> Iterator[Breakage]:
    """Replay a trace from a random moment on, again and again.

    With more servers than the trace has, servers share a history, from other moments on.
    """
    order = chance.sample(range(trace.servers), trace.servers)
    laps = math.ceil(servers / trace.servers)
    offsets = [chance.uniform(0, trace.seconds) for _ in range(laps)]
    first_lap: list[Breakage] = []
    for outage in trace.outages:
        for lap, offset in enumerate(offsets):
            server = order[outage.server] + lap * trace.servers
            if server < servers:
                begin = (outage.begin - offset) % trace.seconds
                first_lap.append(Breakage(begin, (server,), outage.end - outage.begin))
                # An outage that is under way at the beginning.
                if begin + outage.end - outage.begin > trace.seconds:
                    rest = begin + outage.end - outage.begin - trace.seconds
                    yield Breakage(0.0, (server,), rest)
    first_lap.sort()
    for lap in itertools.count() if first_lap else ():
        yield from (each._replace(time=each.time + lap * trace.seconds) for each in first_lap)


# ---- the run


class _RunState:
    """The state of a simulated run at a moment.

    Invariants:
        - A server is broken, stands by, or has a slot; a slot has one server or is vacant.
        - `_pending` is the work since the last checkpoint, in seconds of servers and in samples.
        - `_unhealed` has the slots that were hit since the stall under way began.
        - The parts of time add up to the servers times `_now`.
    """

    def __init__(
        self,
        division: Division,
        response: FailureResponse,
        samples_per_second: Callable[[int], float],
        period: float,
        together: int,
    ) -> None:
        self._division, self._response, self._period = division, response, period
        self._shrinks = can_shrink(division, response)
        self._rates: dict[int, float] = {}
        self._samples_per_second = samples_per_second
        # Holders of a part of the state are in different groups that fail together, if possible.
        self._stride = together if division.train % together == 0 < division.train - together else 1
        self._slot_by_server = {server: server for server in range(division.train)}
        self._standby = list(range(division.train, division.servers))
        self._vacant: list[int] = []
        self._broken = set[int]()
        self._unhealed = set[int]()
        self._restarting = False
        self._now = self._stall = 0.0
        self._is_saving, self._phase = False, period  # and the seconds that are left of it
        self._pending, self._pending_samples = 0.0, 0.0
        self._useful = self._checkpoint = self._stalled = self._repeated = 0.0
        self._standby_time = self._broken_time = 0.0
        self._samples = self._most_samples = 0.0
        self._failures = self._restarts = 0

    @property
    def _active(self) -> int:
        return len(self._slot_by_server) if self._shrinks or not self._vacant else 0

    def advance(self, moment: float) -> None:
        """Go on until `moment`, in which nothing fails and nothing comes back."""
        left, self._now = moment - self._now, moment
        waiting = len(self._slot_by_server) - self._active
        self._standby_time += left * (len(self._standby) + waiting)
        self._broken_time += left * len(self._broken)
        stalled = min(left, self._stall)
        self._stalled += stalled * self._active
        self._stall -= stalled
        if self._stall <= 0:
            self._unhealed.clear()
            self._restarting = False
        if self._active:
            self._train(left - stalled)

    def _train(self, left: float) -> None:
        """Train and save for some seconds."""
        cycle = self._period + self._response.save
        while left > 0:
            # Whole cycles at once. They are kept at their end.
            if self._phase == self._period and not self._is_saving and left >= cycle:
                cycles = left // cycle
                self._pending += cycles * self._period * self._active
                self._pending_samples += cycles * self._period * self._find_rate()
                self._checkpoint += cycles * self._response.save * self._active
                self._keep_pending()
                left = max(left - cycles * cycle, 0.0)
                continue
            step = min(left, self._phase)
            if self._is_saving:
                self._checkpoint += step * self._active
            else:
                self._pending += step * self._active
                self._pending_samples += step * self._find_rate()
            self._phase -= step
            left -= step
            if self._phase <= 0:
                if self._is_saving:
                    self._keep_pending()
                self._is_saving = not self._is_saving
                self._phase = self._response.save if self._is_saving else self._period

    def _find_rate(self) -> float:
        """Samples per second of the servers that train now."""
        if self._active not in self._rates:
            self._rates[self._active] = self._samples_per_second(self._active)
        return self._rates[self._active] * (1 - self._copying_share)

    @property
    def _copying_share(self) -> float:
        return self._response.copy_share * (self._division.copies - 1)

    def _keep_pending(self) -> None:
        """Count the work since the last checkpoint: it can't be lost any more."""
        self._useful += self._pending
        self._samples += self._pending_samples
        self._most_samples = max(self._most_samples, self._samples)
        self._pending = self._pending_samples = 0.0

    def break_servers(self, servers: Sequence[int], *, returns: bool) -> list[int]:
        """Break servers now. Returns those that are away: those that were up before.

        If `returns` is false, they are replaced at once, and keep their slots.
        """
        struck = [server for server in servers if server not in self._broken]
        slots = [
            self._slot_by_server[server] for server in struck if server in self._slot_by_server
        ]
        self._most_samples = max(self._most_samples, self._samples + self._pending_samples)
        if slots:
            self._failures += len(slots)
            self._unhealed.update(slots)
            self._begin_stall(slots)
        if not returns:
            return []
        for server in struck:
            self._broken.add(server)
            slot = self._slot_by_server.pop(server, None)
            if slot is None:
                self._standby.remove(server)
            else:
                self._vacant.append(slot)
        while self._vacant and self._standby:
            self._slot_by_server[self._standby.pop()] = self._vacant.pop()
        return struck

    def _begin_stall(self, slots: Sequence[int]) -> None:
        """Begin the stall after a failure. All restart if a part of the state is lost."""
        response = self._response
        if self._restarting or any(self._is_part_lost(slot) for slot in slots):
            self._restarts += not self._restarting
            self._repeated += self._pending
            self._pending = self._pending_samples = 0.0
            self._is_saving, self._phase = False, self._period
            self._restarting = True
            self._stall = max(self._stall, response.notice + response.restart)
        else:
            self._stall = max(self._stall, response.notice + response.heal)

    def _is_part_lost(self, slot: int) -> bool:
        """Whether all holders of some part of the state, `slot` among them, are unhealed."""
        train, copies = self._division.train, self._division.copies
        if copies >= train:
            return len(self._unhealed) >= len(self._slot_by_server)
        return any(
            all(
                (slot + (holder - first) * self._stride) % train in self._unhealed
                for holder in range(copies)
            )
            for first in range(copies)
        )

    def take_back(self, server: int) -> None:
        """Take back a server that has been replaced."""
        self._broken.remove(server)
        if not self._vacant:
            self._standby.append(server)
            return
        self._slot_by_server[server] = self._vacant.pop()
        survives = self._division.copies > 1
        self._stall += self._response.join if survives else self._response.restart

    def finish(self) -> SimulatedRun:
        """Return the totals. Work since the last checkpoint counts: the run has ended."""
        self._keep_pending()
        copying = self._useful * self._copying_share
        time = ServerTime(
            self._useful - copying,
            copying,
            self._checkpoint,
            self._stalled,
            self._repeated,
            self._standby_time,
            self._broken_time,
        )
        check_conserved(time, self._division.servers * self._now)
        return SimulatedRun(
            self._now, self._samples, self._most_samples, time, self._failures, self._restarts
        )
