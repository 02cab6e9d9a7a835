"""Messages between the launchers of a job that may start again.

    every host             -- HostReport -->                  the launcher that decides
    the deciding launcher  -- Sequel -->                      every host
    every host             -- RestartState, in its offer -->  the next rendezvous

They tell how each host saw the end of a start, what follows, and how far the restarts have come.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Self

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.channel import Channel, close_channels


class Cause(NamedTuple):
    """An error that ended a worker. If it is final, every start would end in it."""

    kind: str
    message: str
    is_final: bool


@dataclass(frozen=True)
class HostReport:
    """What one host has seen of a start that has failed.

    Args:
        folder: Folder of the run that its workers have opened; None if there is none.
        seed: Seed of that run.
        began: Time at which it began, in seconds since the epoch.
        runs: Number of runs that the workers have opened.
        checkpoint: Newest checkpoint of the run that this host sees.
        failure: How the worker that failed first has ended, if it ran on this host.
        cause: The error of that worker; None if it was killed.
    """

    folder: str | None = None
    seed: int = 0
    began: float = 0.0
    runs: int = 0
    checkpoint: str | None = None
    failure: str | None = None
    cause: Cause | None = None

    def dump(self) -> dict[str, Any]:
        """Write the report as a message for `load`."""
        return asdict(self) | {"cause": self.cause}

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read a report from a message. Raises one of `channel.MALFORMED` if it is malformed."""
        report = cls(**value)
        cause = None if report.cause is None else Cause(*report.cause)
        texts = (report.folder, report.checkpoint, report.failure)
        has_right_types = (
            all(text is None or type(text) is str for text in texts)
            and type(report.seed) is type(report.runs) is int
        )
        if not has_right_types or type(report.began) not in (int, float):
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
    """How far the restarts of a job have come.

    It has the number of `allowed` restarts, what the next start has to know, and digests of earlier
    errors.
    """

    allowed: int
    start: JobStart = field(default_factory=JobStart)
    causes: tuple[str, ...] = ()

    @property
    def sort_key(self) -> tuple[int, bool]:
        """A sort key: of two states of a job, the later one is greater."""
        return len(self.start.events), self.start.folder is not None

    def dump(self) -> dict[str, Any]:
        """Write the state as a message for `load`."""
        return asdict(self)

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read a state from a message. Raises one of `channel.MALFORMED` if it is malformed."""
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
    """What follows on the failure of a start.

    It says so in words, and has the state of the next start if there is one.
    """

    words: str
    state: RestartState | None = None

    def dump(self) -> dict[str, Any]:
        """Write the sequel as a message for `load`."""
        return {"words": self.words, "state": None if self.state is None else self.state.dump()}

    @classmethod
    def load(cls, value: Any) -> Self:
        """Read a sequel from a message. Raises one of `channel.MALFORMED` if it is malformed."""
        if {*value} != {each.name for each in fields(cls)} or type(value["words"]) is not str:
            raise TypeError("it is no sequel")
        return cls(
            value["words"], None if value["state"] is None else RestartState.load(value["state"])
        )


class JobStopped(KeyboardInterrupt):
    """A launcher was asked to end the job while launchers met.

    Args:
        number: Signal that asked for the end.
        host: Name of the launcher's host.
        here: Whether it is this launcher.
    """

    def __init__(self, number: int, host: str, *, here: bool = False) -> None:
        super().__init__(
            f"the launcher on {host} was asked to end the job ({signal.Signals(number).name})"
        )
        self.signum, self.host, self.is_here = number, host, here

    def dump(self) -> dict[str, Any]:
        """Write the message that tells other launchers."""
        return {"kind": "stopped", "number": self.signum, "host": self.host}


@dataclass(frozen=True)
class Links:
    """Connections that stay between the launchers of a job while it starts again.

    Args:
        host: Number that this host had.
        server: Number of the host with which all were connected.
        hosts: Number of all hosts.
        channels: The connections, by host number.
    """

    host: int
    server: int
    hosts: int
    channels: dict[int, Channel]

    @property
    def is_host_missing(self) -> bool:
        """Whether a host is missing, as far as this one knows."""
        return len(self.channels) < (self.hosts - 1 if self.host == self.server else 1)

    def stop_job(self, stop: JobStopped, seconds: float) -> None:
        """Tell the others that the job ends, for at most `seconds`, and hang up."""
        for channel in self.channels.values():
            channel.send(stop.dump())
        close_channels(self.channels.values(), seconds)
        self.channels.clear()

    def close(self) -> None:
        """Hang up. The other launchers then go to the meeting point again."""
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()
