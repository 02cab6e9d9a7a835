"""The goodput that servers reach although some of them fail: a closed form.

    N servers = those that train + those that stand by

    train    x x x x x x x x      one fails:  standby takes its place, after a stall
    standby  s s                              no standby left: the others go on without it
                                              repaired: it comes back, as standby if all train

Two ways to go on after a failure:

- **One copy of the state.** All restart from the last checkpoint. Each failure costs the restart,
  and on average half of what was trained between two checkpoints.
- **Several copies in memory.** The others go on. Only when all copies of a part of the state are
  lost before the first of them is healed, all restart from the last checkpoint. So checkpoints
  may be rare.

The closed form is of first order in failures: the share of time that stalls and repeated work take
is their rate times their length. It holds while this share is small (`MAX_LOST_SHARE`).
`paceline.planner.budgets.failure_simulation` has no such limit.

References:
    arXiv 2410.21680, section III (ETTR). arXiv 2410.18124 (period). J. T. Daly, A higher order
    estimate of the optimum checkpoint interval for restart dumps, 2006.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.planner.budgets.failures import DAY, Failures

# Share of time, lost to stalls and repeated work, up to which the closed form is within 2 % of the
# simulation.
MAX_LOST_SHARE: Final = 0.15
# Seconds between two checkpoints, at most: failures of software have no closed form.
MAX_PERIOD: Final = DAY
_STANDARD_DEVIATIONS: Final = 12.0  # of the number of broken servers, which are summed over


@dataclass(frozen=True)
class FailureResponse:
    """What a job does when a server fails, and how many seconds it takes.

    Attributes:
        notice: Until a failure is noticed.
        heal: Until the others train again, once they have noticed.
        join: All pause to let a server in, which trains with them from then on.
        save: Training stands still for a checkpoint.
        restart: Until all train again from a checkpoint, once the failure is noticed.
        replace: Until a broken server is replaced. 0: at once.
        copy_share: Part of the training time that each copy of the state beyond the first takes.
        shrinks: Whether fewer servers go on without the broken ones, if there are copies of the
            state. If not, all wait for a replacement once no server stands by. A job that restarts
            always waits, as `paceline run --restarts` does.
    """

    notice: float
    heal: float
    join: float
    save: float
    restart: float
    replace: float
    copy_share: float = 0.0
    shrinks: bool = True


class Division(NamedTuple):
    """How servers are divided: those that train, those that stand by, and copies of the state.

    `copies` is the number of servers that hold each part of the state in memory. With 1, a failure
    restarts all from a checkpoint.
    """

    train: int
    standby: int
    copies: int

    @property
    def servers(self) -> int:
        """Number of all servers."""
        return self.train + self.standby


class ServerTime(NamedTuple):
    """Where the time of all servers went. As shares, the parts add up to 1."""

    useful: float  # trained samples that count
    copying: float  # sent copies of the state
    checkpoint: float  # stood still for checkpoints
    stalled: float  # noticed, healed, restarted or let a server in
    repeated: float  # trained samples that were lost
    standby: float  # stood by, or waited for a replacement
    broken: float

    def scale(self, factor: float) -> ServerTime:
        """Multiply all parts by a factor."""
        return ServerTime(*(part * factor for part in self))

    def add(self, other: ServerTime) -> ServerTime:
        """Add the parts of another time."""
        return ServerTime(*(one + more for one, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Goodput:
    """The goodput of a division of servers.

    Attributes:
        division: The division.
        period: Seconds of training between two checkpoints.
        samples_per_second: Samples per second that count.
        time: Shares of the time of all servers.
        lost_share: Share of the time of the servers that train which stalls and repeated work take.
        doubt: Why the closed form doesn't hold here. Empty if it does.
    """

    division: Division
    period: float
    samples_per_second: float
    time: ServerTime
    lost_share: float
    doubt: str = ""


# ---- the checkpoint period


def choose_period(rate: float, save: float, recover: float = 0.0) -> float:
    """Choose the seconds of training between two checkpoints.

    Args:
        rate: Failures per second after which a checkpoint is needed.
        save: Seconds that a checkpoint blocks training.
        recover: Seconds of a recovery. Default: 0.

    Returns:
        T - Ts of T = Ts + sqrt(2 (1/rate + Tr) Ts + Ts^2) (arXiv 2410.18124), at most `MAX_PERIOD`,
        and at least one second.
    """
    if rate <= 0:
        return MAX_PERIOD
    period = math.sqrt(2 * (1 / rate + recover) * save + save * save)
    return min(max(period, 1.0), MAX_PERIOD)


def compute_daly_period(mean_time: float, save: float) -> float:
    """Compute Daly's optimum: seconds of work between two checkpoints.

    Args:
        mean_time: Mean seconds between failures.
        save: Seconds of a checkpoint.
    """
    if save >= 2 * mean_time:
        return mean_time
    ratio = save / (2 * mean_time)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * save * mean_time) * series - save


def compute_daly_cost(mean_time: float, save: float, restart: float, period: float) -> float:
    """Compute the wall time of a second of work: Daly's complete model, which is exact.

    Args:
        mean_time: Mean seconds between failures.
        save: Seconds of a checkpoint.
        restart: Seconds of a restart.
        period: Seconds of work between two checkpoints.
    """
    return (
        mean_time * math.exp(restart / mean_time) * math.expm1((period + save) / mean_time) / period
    )


# ---- rates


def compute_loss_rate(rate: float, division: Division, healing: float) -> float:
    """Compute how often all copies of a part of the state are lost, per second.

    Each server that trains has a part of the state, which `copies` servers hold. A part is lost if
    all of them fail before the first one has been healed.

    Args:
        rate: Failures of one server per second.
        division: Division of the servers.
        healing: Seconds until a lost copy is made again.
    """
    copies = min(division.copies, division.train)
    # All parts are lost together if every server holds every part.
    parts = division.train if copies < division.train else 1
    unhealed = -math.expm1(-rate * healing)
    return float(parts * copies * rate * unhealed ** (copies - 1))


def list_broken_counts(servers: int, rate: float, replace: float) -> Iterator[tuple[int, float]]:
    """Yield how many of the servers are broken, and the share of time for which it is so.

    Servers break and are replaced independently (a machine-repair chain with a repairer for each),
    so the count has a binomial distribution, whatever the distribution of the time to replace.
    """
    broken = rate * replace / (1 + rate * replace)
    if broken == 0:
        yield 0, 1.0
        return
    mean = servers * broken
    reach = _STANDARD_DEVIATIONS * math.sqrt(mean * (1 - broken)) + _STANDARD_DEVIATIONS
    first, last = max(0, int(mean - reach)), min(servers, int(mean + reach) + 1)
    logs = [
        math.lgamma(servers + 1)
        - math.lgamma(count + 1)
        - math.lgamma(servers - count + 1)
        + count * math.log(broken)
        + (servers - count) * math.log1p(-broken)
        for count in range(first, last + 1)
    ]
    weights = [math.exp(value) for value in logs]
    total = math.fsum(weights)
    for count, weight in enumerate(weights, first):
        yield count, weight / total


# ---- the closed form


def estimate_goodput(
    division: Division,
    failures: Failures,
    response: FailureResponse,
    samples_per_second: Callable[[int], float],
    period: float | None = None,
) -> Goodput:
    """Estimate the goodput of a division of servers in closed form.

    Args:
        division: Servers that train and stand by, and copies of the state.
        failures: How servers fail.
        response: What the job does when a server fails.
        samples_per_second: Samples per second of a number of servers that train, without failures.
        period: Seconds of training between two checkpoints. Default: chosen by `choose_period`.

    Returns:
        The goodput. Its `doubt` says why it doesn't hold, if it doesn't.
    """
    rate, servers = failures.rate, division.servers
    stall, restart = response.notice + response.heal, response.notice + response.restart
    survives = division.copies > 1
    loss_rate = compute_loss_rate(rate, division, stall)
    if period is None:
        period = choose_period(loss_rate, response.save, restart)
    goodput, losses, trained, time = 0.0, 0.0, 0.0, ServerTime(*[0.0] * 7)
    for broken, probability in list_broken_counts(servers, rate, response.replace):
        active = count_active(division, response, broken)
        scale = active / division.train
        stalls, returns = _count_stalls(division, response, rate, broken, active)
        stalled = returns * (response.join if survives else response.restart)
        stalled += stalls * (loss_rate * scale * restart + survives * rate * active * stall)
        repeated = loss_rate * scale * period / 2
        lost = min(stalled + repeated, 1.0) if active else 0.0
        losses += probability * active * (stalled + repeated)
        trained += probability * active
        if stalled + repeated > 1:
            stalled, repeated = (part / (stalled + repeated) for part in (stalled, repeated))
        training = (1 - lost) / (1 + response.save / period)
        useful = training * (1 - response.copy_share * (division.copies - 1))
        goodput += probability * samples_per_second(active) * useful
        shares = ServerTime(
            active * useful,
            active * (training - useful),
            active * training * response.save / period,
            active * stalled,
            active * repeated,
            servers - broken - active,
            broken,
        )
        time = time.add(shares.scale(probability / servers))
    check_conserved(time, 1.0)
    lost_share = losses / trained if trained else 0.0
    doubt = _find_doubt(failures, lost_share)
    return Goodput(division, period, goodput, time, lost_share, doubt)


def count_active(division: Division, response: FailureResponse, broken: int) -> int:
    """Count the servers that train while some servers are broken."""
    up = division.servers - broken
    return min(division.train, up) if can_shrink(division, response) or up >= division.train else 0


def can_shrink(division: Division, response: FailureResponse) -> bool:
    """Whether fewer servers go on if one is broken and none stands by."""
    return response.shrinks and division.copies > 1


def _count_stalls(
    division: Division, response: FailureResponse, rate: float, broken: int, active: int
) -> tuple[int, float]:
    """Count what stalls the servers that train while `broken` ones are broken.

    Returns:
        1 if a failure stalls them, and 0 if it has them wait for a replacement, which hides the
        stall; and the number of servers per second that are let in.
    """
    if not active or not response.replace:
        return 1, 0.0
    if can_shrink(division, response):
        # Without standby, a server that has been replaced is let in.
        return 1, broken / response.replace if broken > division.standby else 0.0
    if broken < division.standby:
        return 1, 0.0
    # The next failure has all wait. They begin again as often as they stop.
    return 0, rate * active


def check_conserved(time: ServerTime, total: float) -> None:
    """Assert that the parts of a time add up to the whole."""
    difference = abs(math.fsum(time) - total)
    assert difference <= 1e-9 * max(total, 1.0), f"{difference} of {total} s are not accounted for"


def _find_doubt(failures: Failures, lost_share: float) -> str:
    """Say why the closed form doesn't hold; empty if it does."""
    if failures.trace is not None:
        return "failures of a trace aren't memoryless"
    if failures.together > 1:
        return f"{failures.together} servers fail together"
    if lost_share > MAX_LOST_SHARE:
        return (
            f"failures take {lost_share:.0%} of the time, and above {MAX_LOST_SHARE:.0%} they "
            "come while others are being healed"
        )
    return ""
