"""Messages between the launchers of a job that may restart.

every host          -- HostReport -->                      the one that decides
the one that decides   -- Sequel -->                       every host
every host          -- RestartState, with its offer -->    the next meeting

They say how each host saw the end of a start, what follows, and which hosts come to the next start.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.channel import Channel, hang_up


class Cause(NamedTuple):
    """An error that ended a worker: its kind, its message, and whether every start would end in
    it.
    """

    kind: str
    message: str
    is_final: bool


@dataclass(frozen=True)
class HostReport:
    """What one host has seen of a start that has failed.

    `folder`, `seed` and `began` are those of the run that its workers have opened, of which there
    are `runs`; `checkpoint` is the newest that it sees there. `failure` says how the worker ended
    that failed first, on the host that had it; `cause` is its error, and None for a worker that was
    killed.
    """

    folder: str | None = None
    seed: int = 0
    began: float = 0.0
    runs: int = 0
    checkpoint: str | None = None
    failure: str | None = None
    cause: Cause | None = None

    def dump(self) -> dict[str, Any]:
        """Return a message for `load`."""
        return asdict(self) | {"cause": self.cause}

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read from a message. Raises one of `channel.SENSELESS` for what is none."""
        report = cls(**value)
        cause = None if report.cause is None else Cause(*report.cause)
        texts = (report.folder, report.checkpoint, report.failure)
        right = (
            all(text is None or type(text) is str for text in texts)
            and type(report.seed) is type(report.runs) is int
        )
        if not right or type(report.began) not in (int, float):
            raise TypeError("it is no report of a host")
        if cause is not None and (type(cause.kind), type(cause.message), type(cause.is_final)) != (
            str,
            str,
            bool,
        ):
            raise TypeError("it is no report of a host")
        return cls(**{**value, "cause": cause})


@dataclass(frozen=True)
class RestartState:
    """How far the restarts of a job have come: how many are `allowed`, what the next start has
    to know, and digests of earlier errors.
    """

    allowed: int
    start: JobStart = field(default_factory=JobStart)
    causes: tuple[str, ...] = ()

    @property
    def progress(self) -> tuple[int, bool]:
        """Order of states: the later one of two is greater."""
        return len(self.start.events), self.start.folder is not None

    def dump(self) -> dict[str, Any]:
        """Return a message for `load`."""
        return asdict(self)

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read from a message. Raises one of `channel.SENSELESS` for what is none."""
        start, causes = JobStart.load(json.dumps(value["start"])), tuple(value["causes"])
        texts = [
            *causes,
            *(what for _, what in start.events),
            "" if start.folder is None else start.folder,
        ]
        times = [start.began, *(when for when, _ in start.events)]
        if not all(type(text) is str for text in texts) or not all(
            type(time) in (int, float) for time in times
        ):
            raise TypeError("it is no state of restarts")
        if type(value["allowed"]) is not int or type(start.seed) is not int:
            raise TypeError("it is no state of restarts")
        return cls(value["allowed"], start, causes)


@dataclass(frozen=True)
class Sequel:
    """What follows on the end of a start, in words; with the state of the next start, if there
    is one.
    """

    words: str
    state: RestartState | None = None

    def dump(self) -> dict[str, Any]:
        """Return a message for `load`."""
        return {"words": self.words, "state": None if self.state is None else self.state.dump()}

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read from a message. Raises one of `channel.SENSELESS` for what is none."""
        if {*value} != {each.name for each in fields(cls)} or type(value["words"]) is not str:
            raise TypeError("it is no sequel")
        return cls(
            value["words"], None if value["state"] is None else RestartState.load(value["state"])
        )


class JobStopped(KeyboardInterrupt):
    """The launcher on `host` was asked to end the job, by a signal of this number, while
    launchers met. `here`: it is this one.
    """

    def __init__(self, number: int, host: str, *, here: bool = False) -> None:
        super().__init__(
            f"the launcher on {host} was asked to end the job ({signal.Signals(number).name})"
        )
        self.number, self.host, self.here = number, host, here

    def dump(self) -> dict[str, Any]:
        """Return the message that tells another launcher."""
        return {"kind": "stopped", "number": self.number, "host": self.host}


@dataclass(frozen=True)
class Links:
    """Connections that stay between the launchers of a job while it starts again.

    `host` is the number that this one had, `server` that of the one that all are connected with,
    and `hosts` how many there were.
    """

    host: int
    server: int
    hosts: int
    channels: dict[int, Channel]

    @property
    def lost(self) -> bool:
        """Whether hosts are missing, as far as this one knows."""
        return len(self.channels) < (self.hosts - 1 if self.host == self.server else 1)

    def stop(self, stop: JobStopped, seconds: float) -> None:
        """Tell the others that the job ends, for at most so many `seconds`, and hang up."""
        for channel in self.channels.values():
            channel.send(stop.dump())
        hang_up(self.channels.values(), seconds)
        self.channels.clear()

    def close(self) -> None:
        """Hang up: the others go to the meeting point anew."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
