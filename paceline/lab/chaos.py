"""Faults as data: what is to go wrong, where, and when; written the same way in Python, on the
command line and in `repr`.

    verb    what happens                                                   undone
    kill    SIGKILL to one worker                                          never
    stop    SIGSTOP to one worker and its readers                          SIGCONT after `seconds`
    cut     a host's network is unplugged                                  after `seconds`
    slow    a host gets `factor` of its processors                         after `seconds`, if given
    link    a host's network gets another bandwidth                        after `seconds`, if given
    crash   a host loses its power: its processes and its network go       never
    join    a host that the job was started without (or that has crashed)  never
            starts its launcher
    storm   faults drawn from a seed

A fault comes when the worker it concerns (of a host, the first) has taken `step` steps and is about
to begin the next: 0 is before the first. That worker is held there until the fault has been carried
out.
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
    """Gives a fault its notation as `repr`: the verb, which is the class's name in small
    letters, with all arguments but defaults.
    """

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            (field.name, getattr(self, field.name))
            for field in fields
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__.lower()}({', '.join(f'{name}={value!r}' for name, value in given)})"  # noqa: E501

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name in _CHECKS and (value is not None or field.default is MISSING):
                holds, wanted = _CHECKS[field.name]
                if not holds(value):
                    raise UsageError(f"{self!r}: {field.name} is {value!r}, and has to be {wanted}")


@dataclass(frozen=True, repr=False, kw_only=True)
class Kill(_NotedFault):
    """Sends SIGKILL to this rank's process.

    >>> cluster.run("train.py", faults=[lab.kill(rank=1, step=10)])
    """

    rank: int
    step: int


@dataclass(frozen=True, repr=False, kw_only=True)
class Stop(_NotedFault):
    """Stops the process of a rank, and its readers, for some seconds (SIGSTOP, then SIGCONT).

    >>> cluster.run("train.py", faults=[lab.stop(rank=1, step=10, seconds=2.0)])
    """

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True, repr=False, kw_only=True)
class Cut(_NotedFault):
    """Cuts this host off for so many seconds: no packet gets in or out, and no process is notified.

    >>> cluster.run("train.py", faults=[lab.cut(host=1, step=10, seconds=2.0)])
    """

    host: int
    seconds: float
    step: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Slow(_NotedFault):
    """Leaves this host `factor` of its processors, for so many seconds or to the end.

    >>> cluster.run("train.py", faults=[lab.slow(host=1, factor=0.5, step=10)])

    `factor` multiplies the quota of the cluster's description; a host without one counts as having
    as many cores as its workers have threads, though not more than the machine has. Later ones
    replace earlier ones: they don't multiply.
    """

    host: int
    factor: float
    step: int
    seconds: float | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class Link(_NotedFault):
    """Changes the rate of a host's link ("10mbit", or bits per second), for a time or to the end.

    >>> cluster.run("train.py", faults=[lab.link(host=1, bandwidth="10mbit", step=10, seconds=5.0)])

    `bandwidth` is for both directions, `up` for sending, `down` for receiving. A direction that
    isn't given stays as it is.
    """

    host: int
    bandwidth: str | int | None = None
    up: str | int | None = None
    down: str | int | None = None
    step: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = self.up is not None or self.down is not None
        if self.bandwidth is None and not sides:
            raise UsageError(
                f"{self!r} changes nothing: give bandwidth='10mbit', or one of up and down"
            )
        if self.bandwidth is not None and sides:
            raise UsageError(
                f"{self!r} has a bandwidth, which is that of both directions, and up or down "
                "besides: leave one out"
            )
        for name in ("bandwidth", "up", "down"):
            if getattr(self, name) is not None:
                parse_rate(getattr(self, name), f"{self!r}: {name}")

    def sides(self) -> tuple[Rate | None, Rate | None]:
        """Return the new limits of sending and receiving in bits per second; None: as before."""
        up, down = (
            side if self.bandwidth is None else self.bandwidth for side in (self.up, self.down)
        )
        return None if up is None else parse_rate(up), None if down is None else parse_rate(down)


@dataclass(frozen=True, repr=False, kw_only=True)
class Crash(_NotedFault):
    """Takes the power of a host: nothing leaves it any more, and all its processes are gone.

    >>> cluster.run("train.py", faults=[lab.crash(host=1, step=10)], min_workers=1)

    The launcher is one of them.
    """

    host: int
    step: int = 0


@dataclass(frozen=True, repr=False, kw_only=True)
class Join(_NotedFault):
    """Lets a host start its launcher only when the first worker of the others is at a step.

    >>> cluster.run("train.py", faults=[lab.join(host=1, step=10)], min_workers=1)

    The host itself exists from the start. If it has crashed before, it was in the job from the
    start; this is its return.
    """

    host: int
    step: int


# the kinds of a storm: a host that joins was left out from the start
Drawn = Literal["stop", "cut", "slow", "link", "kill", "crash"]
_DRAWN: Final = get_args(Drawn)
Fault: TypeAlias = Kill | Stop | Cut | Slow | Link | Crash | Join


@dataclass(frozen=True, repr=False, kw_only=True)
class Storm(_NotedFault):
    """Draws faults of these kinds over the first `steps` steps.

    >>> cluster.run("train.py", faults=[lab.storm(seed=1, faults=3, kinds=("stop", "slow"))])

    The same seed gives the same faults in the same cluster. `kinds` are verbs; kill and crash are
    possible too, join isn't. Each fault lasts a time between the two `seconds`.
    """

    seed: int
    faults: int = 5
    steps: int = 100
    kinds: Sequence[Drawn] = ("stop", "cut", "slow", "link")
    seconds: Sequence[float] = (0.5, 3.0)

    def __post_init__(self) -> None:
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
        """Draw the faults of this storm in that cluster, by step; the same every time.

        Hosts that are `late` are spared.
        """
        generator = random.Random(self.seed)
        hosts = [host for host in range(len(cluster.hosts)) if host not in late]
        drawn = [self._draw_one(generator, cluster, hosts) for _ in range(self.faults)]
        return sorted(drawn, key=lambda fault: fault.step)

    def _draw_one(self, generator: random.Random, cluster: Description, hosts: list[int]) -> Fault:
        kind, step = (
            self.kinds[_draw_below(generator, len(self.kinds))],
            _draw_below(generator, self.steps),
        )
        host, rank = (
            hosts[_draw_below(generator, len(hosts))],
            _draw_below(generator, sum(cluster.hosts[index].workers for index in hosts)),
        )
        shortest, longest = self.seconds
        seconds, part = (
            round(shortest + (longest - shortest) * generator.random(), 2),
            round(0.1 + 0.8 * generator.random(), 2),
        )
        match kind:
            case "kill":
                return Kill(rank=rank, step=step)
            case "stop":
                return Stop(rank=rank, step=step, seconds=seconds)
            case "cut":
                return Cut(host=host, seconds=seconds, step=step)
            case "slow":
                return Slow(host=host, factor=part, step=step, seconds=seconds)
            case "link":
                most = min(
                    (
                        side
                        for side in (cluster.hosts[host].up, cluster.hosts[host].down)
                        if side is not None
                    ),
                    default=_UNLIMITED,
                )
                return Link(
                    host=host,
                    bandwidth=spell_rate(max(int(most * part / 1e3) * 1000, _SLOWEST)),
                    step=step,
                    seconds=seconds,
                )
            case _:
                return Crash(host=host, step=step)


# as they are written
kill, stop, cut, slow, link, crash, join, storm = Kill, Stop, Cut, Slow, Link, Crash, Join, Storm

VERBS: Final[notation.Vocabulary] = {
    kind.__name__.lower(): kind for kind in (Kill, Stop, Cut, Slow, Link, Crash, Join, Storm)
}


def parse_faults(text: str) -> list[Fault | Storm]:
    """Parse the faults in `text`: one, or several in brackets.

    Raises `UsageError` with text, found and possible.
    """
    try:
        parsed = notation.parse_notation(text, VERBS)
    except NotationError as error:
        raise NotationError(f"the fault {text!r}: {error}") from None
    return collect_faults([parsed], text)


def collect_faults(given: Any, text: str | None = None) -> list[Fault | Storm]:
    """Collect faults in one flat list, from objects, texts and lists of both.

    Raises `UsageError` for anything else.
    """
    if isinstance(given, str):
        return parse_faults(given)
    if isinstance(given, list | tuple):
        return [fault for item in given for fault in collect_faults(item, text)]
    if not isinstance(given, Fault | Storm):
        raise UsageError(
            f"{given!r}{'' if text is None else f' in {text!r}'} is no fault: "
            f"write it as kill(rank=2, step=5); verbs: {', '.join(VERBS)}"
        )
    return [given]


def list_faults(given: Any, cluster: Description) -> list[Fault]:
    """List all faults for a run in that cluster, storms drawn.

    Raises `UsageError` for a rank or host that it doesn't have.
    """
    asked = collect_faults(given)
    late = absent_hosts(asked)
    if len(late) == len(cluster.hosts):
        raise UsageError(
            f"every host of {cluster.name} is to join later, so there is no job to join: "
            "leave one join(...) out"
        )
    faults = [
        fault
        for item in asked
        for fault in (item.draw_faults(cluster, late) if isinstance(item, Storm) else [item])
    ]
    workers = sum(host.workers for index, host in enumerate(cluster.hosts) if index not in late)
    for fault in faults:
        if isinstance(fault, Kill | Stop):
            target, count, kind = fault.rank, workers, "rank"
        else:
            target, count, kind = fault.host, len(cluster.hosts), "host"
        if target >= count:
            start = " at the start" if late and kind == "rank" else ""
            raise UsageError(
                f"{fault!r}: there is no {kind} {target}: {cluster.name} has {kind}s 0 to "
                f"{count - 1}{start}"
            )
    joining = [fault.host for fault in faults if isinstance(fault, Join)]
    for host in joining:
        if joining.count(host) > 1:
            raise UsageError(
                f"join(host={host}, ...) is there {joining.count(host)} times: a host joins once"
            )
    return faults


def absent_hosts(faults: Iterable[Fault | Storm]) -> frozenset[int]:
    """Return the hosts that the job starts without, since they join later: all that join, but
    for those that had crashed before.
    """
    listed = list(faults)
    crashed = {fault.host: fault.step for fault in listed if isinstance(fault, Crash)}
    return frozenset(
        f.host for f in listed if isinstance(f, Join) and crashed.get(f.host, math.inf) > f.step
    )


def _draw_below(generator: random.Random, limit: int) -> int:
    # what Python promises to stay the same from one version to the next
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
_UNLIMITED: Final = 10**9  # what a link without a limit counts as in a storm (bits per second)
_SLOWEST: Final = 100_000
