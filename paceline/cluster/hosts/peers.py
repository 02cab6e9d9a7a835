"""Messages between launchers, and the protocol of the launchers of other hosts.

Offer       what a host brings to the job
Failure     how a worker or host failed
LateCall    a call in which workers wait for others

Peers          the other launchers: `FixedPeers`, `ElasticPeers`, or `NoPeers` on one host
RestartPeers   the same, if the whole job may start again
"""

from __future__ import annotations

import ipaddress
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from paceline.cluster.hosts.restart_messages import HostReport, Links, RestartState, Sequel

_MOST_WORKERS = 1 << 16  # of one host


@dataclass(frozen=True)
class Offer:
    """The offer of one host to the job.

    It has the number of its workers, their address, and two ports that are free there.
    """

    name: str
    workers: int
    address: str
    machine: str  # fingerprint: equal for launchers on one machine
    store_port: int
    master_port: int
    placement: str = "block"  # how ranks are dealt to hosts, the same on all
    numbers: tuple[int, ...] = ()  # of its workers, if losses are survived
    agent_port: int = 0  # port of its launcher for the other ones, if losses are survived

    @property
    def seat_facts(self) -> dict[str, Any]:
        """Facts about this host that a view holds."""
        return {"name": self.name, "address": self.address, "port": self.agent_port}

    @classmethod
    def load(cls, value: dict[str, Any]) -> Offer:
        """Read an offer from a message. Raises one of `channel.MALFORMED` if it is malformed."""
        offer = cls(**{**value, "numbers": tuple(value.get("numbers", ()))})
        # JSON doesn't check types, and `bool` is an `int`, so types are compared exactly.
        ports = offer.store_port, offer.master_port, offer.agent_port
        has_integers = all(
            type(integer) is int for integer in (offer.workers, *ports, *offer.numbers)
        )
        if not has_integers or not all(
            type(text) is str
            for text in (offer.name, offer.address, offer.machine, offer.placement)
        ):
            raise TypeError("it is no offer of a host")
        if (
            not 0 < offer.workers <= _MOST_WORKERS
            or len(offer.numbers) not in (0, offer.workers)
            or not all(0 <= port < 1 << 16 for port in ports)
        ):
            raise ValueError("it is no offer of a host")
        ipaddress.ip_address(offer.address.partition("%")[0])
        return offer


@dataclass(frozen=True)
class Failure:
    """A failure that ends the job.

    Args:
        rank: Rank of the worker that failed; None if a whole host is gone.
        host: Name of the host.
        code: Exit code of the worker.
        words: End of the worker in words, such as "failed with exit code 1".
        is_echo: Whether it failed only because another worker had failed.
        age: Seconds since it happened. Clocks of hosts differ, so there is no time.
        tail: Last words of the worker.
    """

    rank: int | None
    host: str
    code: int
    words: str
    is_echo: bool = False
    age: float = 0.0
    tail: str = ""

    @classmethod
    def load(cls, value: Any) -> Failure:
        """Read a failure from a message. Raises `TypeError` or `ValueError` if it is malformed."""
        failure = cls(**value)
        texts, integers = (
            (failure.host, failure.words, failure.tail),
            (failure.code, 0 if failure.rank is None else failure.rank),
        )
        if (
            not all(type(text) is str for text in texts)
            or not all(type(integer) is int for integer in integers)
            or not 0 <= failure.code < 256
        ):
            raise ValueError("it is no failure")
        if type(failure.is_echo) is not bool or type(failure.age) not in (int, float):
            raise ValueError("it is no failure")
        return failure

    def summary_line(self) -> str:
        """The failure in one line."""
        subject = (
            f"rank {self.rank} on {self.host}" if self.rank is not None else f"host {self.host}"
        )
        return f"paceline: {subject} {self.words}"


class LateCall(NamedTuple):
    """A call in which workers wait for others far longer than usual.

    It has the call's number, its name, and whether the workers are about to give up.
    """

    call: int
    what: str
    given_up: bool


def read_late_call(value: Any) -> LateCall:
    """Read a late call from a message. Raises `TypeError` or `ValueError` if it is malformed."""
    late = LateCall(*value)
    if (type(late.call), type(late.what), type(late.given_up)) != (int, str, bool):
        raise ValueError("it is no call")
    return late


def read_stop_message(message: dict[str, Any]) -> tuple[int, str]:
    """Read the signal that asked a launcher to end the job, and its host, from a message.

    Raises `ValueError` if it is malformed.
    """
    return signal.Signals(message["number"]).value, str(message["host"])


def note_late_call(late_calls: dict[int, LateCall], late: LateCall) -> None:
    """Add a late call to the known ones. Once workers are about to give up, that stays noted."""
    if late.call not in late_calls or late.given_up:
        late_calls[late.call] = late


class Peers(Protocol):
    """The launchers of the other hosts, as this host's supervisor uses them.

    They never block. The supervisor polls `list_descriptors()`, passes the ready ones to
    `read_messages`, and calls `run_timers` in every turn.
    """

    verdict: Failure | None  # what ended the job, once all hosts know it
    # the signal by which a launcher was asked to end the job, and its host
    stop_request: tuple[int, str] | None
    all_finished: bool  # every worker of every host has ended well
    late_calls: dict[int, LateCall]  # calls in which workers of any host wait for others

    def list_descriptors(self) -> list[int]: ...
    def read_messages(self, descriptor: int) -> None: ...
    def run_timers(self) -> None: ...
    def tell_failed(self, failure: Failure) -> None: ...
    def tell_stopped(self, number: int) -> None: ...
    def tell_finished(self) -> None: ...
    def tell_late(self, late: LateCall) -> None: ...
    def close(self) -> None: ...


class RestartPeers(Peers, Protocol):
    """The launchers of the other hosts, if all may start again together after a failure.

    `state` is how far the restarts have come, by the latest knowledge of the hosts that met.
    `sequel` is what follows on the failure, once that is decided.
    """

    state: RestartState | None
    sequel: Sequel | None

    @property
    def host_reports(self) -> Mapping[int, HostReport] | None:
        """Reports of all hosts that are still connected, by host number.

        None unless this host is to decide, and all reports have come.
        """

    def tell_ended(self, report: HostReport) -> None: ...
    def tell_sequel(self, sequel: Sequel) -> None: ...
    def hand_over_links(self) -> Links | None:
        """Hand over the connections for the next start; None if there are none.

        `close` doesn't close them if the job starts again.
        """


class NoPeers:
    """The peers of a job of one host."""

    def __init__(self) -> None:
        self.verdict: Failure | None = None
        self.stop_request: tuple[int, str] | None = None
        self.all_finished = False
        self.late_calls: dict[int, LateCall] = {}
        self.state: RestartState | None = None
        self.sequel: Sequel | None = None
        self.host_reports: Mapping[int, HostReport] | None = None

    def list_descriptors(self) -> list[int]:
        return []

    def read_messages(self, descriptor: int) -> None:
        raise AssertionError(descriptor)

    def run_timers(self) -> None:
        return

    def tell_failed(self, failure: Failure) -> None:
        self.verdict = failure

    def tell_stopped(self, number: int) -> None:
        return

    def tell_finished(self) -> None:
        self.all_finished = True

    def tell_late(self, late: LateCall) -> None:
        note_late_call(self.late_calls, late)

    def close(self) -> None:
        return

    def tell_ended(self, report: HostReport) -> None:
        self.host_reports = {0: report}

    def tell_sequel(self, sequel: Sequel) -> None:
        self.sequel = sequel

    def hand_over_links(self) -> None:
        return None
