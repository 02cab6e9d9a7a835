"""Faults as data: each says what goes wrong, in which place, and before which step.

A fault is written in the same way in Python, on the command line and in `repr`.

    verb    effect                                                         undone
    kill    SIGKILL to one worker                                          never
    stop    SIGSTOP to one worker and its readers                          SIGCONT after `seconds`
    cut     a host's network is unplugged                                  after `seconds`
    slow    a host gets `factor` of its processors                         after `seconds`, if given
    link    a host's network gets another bandwidth                        after `seconds`, if given
    crash   a host loses its power: its processes and its network go       never
    join    a host that was absent at the start (or has crashed) starts    never
            its launcher
    storm   faults drawn from a seed

A fault is carried out when its worker has taken `step` steps and is about to begin the next; 0 is
before the first step. The worker of a fault that concerns a host is the first one of that host. The
worker is held at this place until the fault has been carried out.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from paceline import notation
from paceline.errors import NotationError, UsageError
from paceline.formatting import format_choices
from paceline.lab.description import Description, Rate, parse_rate, spell_rate


class _NotedFault:
    """Base of all faults: shows a fault in its notation, and checks its fields.

    The notation is the verb, which is the lower-case name of the class, with all arguments that
    differ from their defaults.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        arguments = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields
            if getattr(self, field.name) != field.default
        )
        return f"{type(self).__name__.lower()}({arguments})"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # None is fine where it is the default; a field without a default is always checked.
            if field.name in _CHECKS and (value is not None or field.default is MISSING):
                is_valid, wanted = _CHECKS[field.name]
                if not is_valid(value):
                    raise UsageError(f"{self!r}: {field.name} is {value!r}, and has to be {wanted}")


@dataclass(frozen=True, repr=False, kw_only=True)
class Kill(_NotedFault):
    """Kills the process of a rank (SIGKILL).

    >>> cluster.run("train.py", faults=[lab.kill(rank=1, step=10)])
    """

    rank: int
    step: int


@dataclass(frozen=True, repr=False, kw_only=True)
class Stop(_NotedFault):
    """Stops the process of a rank and its readers for a time (SIGSTOP, then SIGCONT).

    >>> cluster.run("train.py", faults=[lab.stop(rank=1, step=10, seconds=2.0)])
    """

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True, repr=False, kw_only=True)
class Cut(_NotedFault):
    """Unplugs the network of a host for a time.

    >>> cluster.run("train.py", faults=[lab.cut(host=1, step=10, seconds=2.0)])

    No packet gets in or out, and no process is notified.
    """

    host: int
    seconds: float
    step: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Slow(_NotedFault):
    """Leaves a host only a part of its processors, for a time or to the end of the run.

    >>> cluster.run("train.py", faults=[lab.slow(host=1, factor=0.5, step=10)])

    `factor` multiplies the quota in the cluster's description. A host without a quota counts as
    having one core for each thread of its workers, but no more cores than the machine. If two such
    faults overlap, the later one replaces the earlier one; their factors aren't multiplied.
    """

    host: int
    factor: float
    step: int
    seconds: float | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class Link(_NotedFault):
    """Changes the rate of a host's link, for a time or to the end of the run.

    >>> cluster.run("train.py", faults=[lab.link(host=1, bandwidth="10mbit", step=10, seconds=5.0)])

    Rates are texts such as "10mbit", or numbers of bits per second. `bandwidth` is for both
    directions, `up` for sending, `down` for receiving. A direction that isn't given stays as it is.
    """

    host: int
    bandwidth: str | int | None = None
    up: str | int | None = None
    down: str | int | None = None
    step: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_direction = self.up is not None or self.down is not None
        if self.bandwidth is None and not has_direction:
            raise UsageError(
                f"{self!r} changes nothing: give bandwidth='10mbit', or one of up and down"
            )
        if self.bandwidth is not None and has_direction:
            raise UsageError(
                f"{self!r} gives bandwidth, which is for both directions, together with up or "
                "down: leave one out"
            )
        for name in ("bandwidth", "up", "down"):
            if getattr(self, name) is not None:
                parse_rate(getattr(self, name), f"{self!r}: {name}")

    def sides(self) -> tuple[Rate | None, Rate | None]:
        """Compute the new limits of sending and receiving, in bits per second (None: unchanged)."""
        up, down = (
            rate if self.bandwidth is None else self.bandwidth for rate in (self.up, self.down)
        )
        return None if up is None else parse_rate(up), None if down is None else parse_rate(down)


@dataclass(frozen=True, repr=False, kw_only=True)
class Crash(_NotedFault):
    """Cuts the power of a host: its network goes down, and all its processes are killed.

    >>> cluster.run("train.py", faults=[lab.crash(host=1, step=10)], min_workers=1)

    Its launcher is killed too.
    """

    host: int
    step: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Join(_NotedFault):
    """Starts the launcher of a host only when the job has reached a step.

    >>> cluster.run("train.py", faults=[lab.join(host=1, step=10)], min_workers=1)

    The step is counted by the first worker of the other hosts. The host itself exists from the
    start. A host with an earlier `crash` is in the job from the start, and returns with this fault.
    """

    host: int
    step: int


# The kinds of a storm. There is no join, since its host would be absent from the start.
Drawn = Literal["stop", "cut", "slow", "link", "kill", "crash"]
_DRAWN: Final = get_args(Drawn)
Fault: TypeAlias = Kill | Stop | Cut | Slow | Link | Crash | Join


@dataclass(frozen=True, repr=False, kw_only=True)
class Storm(_NotedFault):
    """Draws faults of these kinds over the first `steps` steps.

    >>> cluster.run("train.py", faults=[lab.storm(seed=1, faults=3, kinds=("stop", "slow"))])

    The same seed gives the same faults in the same cluster.

    Args:
        seed: Seed of the random generator.
        faults: Number of faults. Default: 5.
        steps: Faults come before steps 0 to `steps` - 1. Default: 100.
        kinds: Verbs to draw from; kill and crash are possible too, join isn't. Default: stop, cut,
            slow and link.
        seconds: Shortest and longest duration of a fault. Default: 0.5 to 3.
    """

    seed: int
    faults: int = 5
    steps: int = 100
    kinds: Sequence[Drawn] = ("stop", "cut", "slow", "link")
    seconds: Sequence[float] = (0.5, 3.0)

    def __post_init__(self) -> None:
        # A frozen dataclass is hashable only if its fields are, so lists become tuples.
        for name in ("kinds", "seconds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, least in (("seed", 0), ("faults", 1), ("steps", 1)):
            value = getattr(self, name)
            if not _is_whole(value) or value < least:
                raise UsageError(
                    f"{self!r}: {name} is {value!r}, and has to be "
                    f"a whole number of at least {least}"
                )
        for kind in self.kinds:
            if kind not in _DRAWN:
                raise UsageError(
                    f"{self!r}: there is no kind {kind!r} in a storm; "
                    f"{format_choices(str(kind), _DRAWN)}"
                )
        if not self.kinds:
            raise UsageError(f"{self!r} has no kinds; possible: {', '.join(_DRAWN)}")
        if (
            len(self.seconds) != 2
            or not all(map(_is_positive, self.seconds))
            or self.seconds[0] > self.seconds[1]
        ):
            raise UsageError(
                f"{self!r}: seconds is {self.seconds!r}, and has to be the shortest and the "
                "longest, such as (0.5, 3.0)"
            )

    def draw_faults(self, cluster: Description, late: frozenset[int] = frozenset()) -> list[Fault]:
        """Draw the faults of this storm for a cluster, in the order of their steps.

        Hosts in `late`, which join later, get no faults.
        """
        generator = random.Random(self.seed)
        hosts = [host for host in range(len(cluster.hosts)) if host not in late]
        drawn = [self._draw_one(generator, cluster, hosts) for _ in range(self.faults)]
        return sorted(drawn, key=lambda fault: fault.step)

    def _draw_one(self, generator: random.Random, cluster: Description, hosts: list[int]) -> Fault:
        # Every kind draws all six numbers, so the steps and places of a seed stay the same when the
        # kinds of the storm change.
        kind = self.kinds[_draw_below(generator, len(self.kinds))]
        step = _draw_below(generator, self.steps)
        host = hosts[_draw_below(generator, len(hosts))]
        rank = _draw_below(generator, sum(cluster.hosts[index].workers for index in hosts))
        shortest, longest = self.seconds
        seconds = round(shortest + (longest - shortest) * generator.random(), 2)
        factor = round(0.1 + 0.8 * generator.random(), 2)
        match kind:
            case "kill":
                return Kill(rank=rank, step=step)
            case "stop":
                return Stop(rank=rank, step=step, seconds=seconds)
            case "cut":
                return Cut(host=host, seconds=seconds, step=step)
            case "slow":
                return Slow(host=host, factor=factor, step=step, seconds=seconds)
            case "link":
                # The new rate is a part of the slower direction, in whole kbit.
                slower_rate = min(
                    (
                        rate
                        for rate in (cluster.hosts[host].up, cluster.hosts[host].down)
                        if rate is not None
                    ),
                    default=_UNLIMITED,
                )
                return Link(
                    host=host,
                    bandwidth=spell_rate(max(int(slower_rate * factor / 1e3) * 1000, _SLOWEST)),
                    step=step,
                    seconds=seconds,
                )
            case _:
                return Crash(host=host, step=step)


# The verbs, as users write them.
kill, stop, cut, slow, link, crash, join, storm = Kill, Stop, Cut, Slow, Link, Crash, Join, Storm

VERBS: Final[notation.Vocabulary] = {
    kind.__name__.lower(): kind for kind in (Kill, Stop, Cut, Slow, Link, Crash, Join, Storm)
}


def parse_faults(text: str) -> list[Fault | Storm]:
    """Parse a text with one fault, or with several faults in brackets.

    Raises:
        NotationError: The text isn't a fault; the message has the text and the possible words.
    """
    try:
        parsed = notation.parse_notation(text, VERBS)
    except NotationError as error:
        raise NotationError(f"the fault {text!r}: {error}") from None
    return collect_faults([parsed], text)


def collect_faults(given: Any, text: str | None = None) -> list[Fault | Storm]:
    """Collect faults from objects, texts and lists of both, in one flat list.

    Args:
        given: A fault, a text, or a list or tuple of them.
        text: The text that `given` was parsed from, for messages. Default: none.

    Raises:
        UsageError: An item is something else.
    """
    if isinstance(given, str):
        return parse_faults(given)
    if isinstance(given, list | tuple):
        return [fault for item in given for fault in collect_faults(item, text)]
    if not isinstance(given, Fault | Storm):
        raise UsageError(
            f"{given!r}{'' if text is None else f' in {text!r}'} isn't a fault: "
            f"write it as kill(rank=2, step=5); verbs: {', '.join(VERBS)}"
        )
    return [given]


def list_faults(given: Any, cluster: Description) -> list[Fault]:
    """List all faults of a run in a cluster, with the faults that its storms draw.

    Raises:
        UsageError: The cluster has no such rank or host, all its hosts join later, or a host joins
            twice.
    """
    collected = collect_faults(given)
    late = absent_hosts(collected)
    if len(late) == len(cluster.hosts):
        raise UsageError(
            f"all hosts of {cluster.name} join later, so there is no job to join: "
            "leave one join(...) out"
        )
    faults = [
        fault
        for item in collected
        for fault in (item.draw_faults(cluster, late) if isinstance(item, Storm) else [item])
    ]
    # Hosts that join later have no ranks at the start, so no fault can name such a rank.
    workers = sum(host.workers for index, host in enumerate(cluster.hosts) if index not in late)
    for fault in faults:
        if isinstance(fault, Kill | Stop):
            target, count, kind = fault.rank, workers, "rank"
        else:
            target, count, kind = fault.host, len(cluster.hosts), "host"
        if target >= count:
            suffix = " at the start" if late and kind == "rank" else ""
            raise UsageError(
                f"{fault!r}: there is no {kind} {target}: {cluster.name} has {kind}s 0 to "
                f"{count - 1}{suffix}"
            )
    joining = [fault.host for fault in faults if isinstance(fault, Join)]
    for host in joining:
        if joining.count(host) > 1:
            raise UsageError(
                f"join(host={host}, ...) is given {joining.count(host)} times: a host joins once"
            )
    return faults


def absent_hosts(faults: Iterable[Fault | Storm]) -> frozenset[int]:
    """Find the hosts that are absent when the job starts, because they join later.

    A host that crashes and then joins again isn't absent at the start.
    """
    fault_list = list(faults)
    crash_steps = {fault.host: fault.step for fault in fault_list if isinstance(fault, Crash)}
    return frozenset(
        fault.host
        for fault in fault_list
        if isinstance(fault, Join) and crash_steps.get(fault.host, math.inf) > fault.step
    )


def _draw_below(generator: random.Random, limit: int) -> int:
    # Python promises that random() keeps its numbers from version to version, unlike randrange().
    return int(generator.random() * limit)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


_CHECKS: Final = {
    "rank": (_is_count, "the number of a worker, from 0 on"),
    "host": (_is_count, "the number of a host, from 0 on"),
    "step": (_is_count, "a number of steps taken, from 0 on"),
    "seconds": (_is_positive, "a time in seconds, above 0"),
    "factor": (lambda value: _is_positive(value) and value <= 1, "above 0, and 1 at most"),
}
# Rates in a storm, in bits per second: that of a link without a limit, and the lowest one drawn.
_UNLIMITED: Final = 10**9
_SLOWEST: Final = 100_000
