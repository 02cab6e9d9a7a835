"""Messages between launchers: what a host offers, what failed, in which calls workers wait, and
what each must hear of the others.
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
    """The offer of one host: its workers, the address they are reached at, and two ports that
    are free there.
    """

    name: str
    workers: int
    address: str
    machine: str  # fingerprint: equal for launchers on one machine
    store_port: int
    master_port: int
    placement: str = "block"  # how ranks are dealt to hosts; all have to want the same
    numbers: tuple[int, ...] = ()  # of its workers, where losses are survived
    agent_port: int = 0  # where its launcher is called by the others then

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of this host that a view holds."""
        return {"name": self.name, "address": self.address, "port": self.agent_port}

    @classmethod
    def load(cls, value: dict[str, Any]) -> Offer:
        """Read from a message. Raises one of `channel.SENSELESS` for what is none."""
        offer = cls(**{**value, "numbers": tuple(value.get("numbers", ()))})
        ports = offer.store_port, offer.master_port, offer.agent_port
        whole = all(type(number) is int for number in (offer.workers, *ports, *offer.numbers))
        if not whole or not all(
            type(text) is str
            for text in (offer.name, offer.address, offer.machine, offer.placement)
        ):
            raise TypeError("it is no offer of a host")
        if (
            not 0 < offer.workers <= _MOST_WORKERS
            or len(offer.numbers) not in (0, offer.workers)
            or not all(0 <= p < 1 << 16 for p in ports)
        ):
            raise ValueError("it is no offer of a host")
        ipaddress.ip_address(offer.address.partition("%")[0])
        return offer


@dataclass(frozen=True)
class Failure:
    """The failure that ended the job: who, where, how.

    `rank` is None when a whole host is gone; `age` are seconds since it happened.
    """

    rank: int | None
    host: str
    code: int
    words: str  # "failed with exit code 1"
    is_echo: bool = False
    age: float = 0.0
    tail: str = ""

    @classmethod
    def load(cls, value: Any) -> Failure:
        """Read from a message. Raises `TypeError` or `ValueError` for what is none."""
        failure = cls(**value)
        texts, numbers = (
            (failure.host, failure.words, failure.tail),
            (failure.code, 0 if failure.rank is None else failure.rank),
        )
        if (
            not all(type(text) is str for text in texts)
            or not all(type(number) is int for number in numbers)
            or not 0 <= failure.code < 256
        ):
            raise ValueError("it is no failure")
        if type(failure.is_echo) is not bool or type(failure.age) not in (int, float):
            raise ValueError("it is no failure")
        return failure

    def line(self) -> str:
        who = f"rank {self.rank} on {self.host}" if self.rank is not None else f"host {self.host}"
        return f"paceline: {who} {self.words}"


class LateCall(NamedTuple):
    """A call in which workers wait for others far longer than usual: its number, its name, and
    whether they are about to give up.
    """

    call: int
    what: str
    given_up: bool


def said_late(value: Any) -> LateCall:
    """Read a late call from a message. Raises `TypeError` or `ValueError` for what is none."""
    late = LateCall(*value)
    if (type(late.call), type(late.what), type(late.given_up)) != (int, str, bool):
        raise ValueError("it is no call")
    return late


def said_stopped(message: dict[str, Any]) -> tuple[int, str]:
    """Read from a message the signal by which a launcher was asked to end the job, and its host.

    Raises `ValueError` for what is none.
    """
    return signal.Signals(message["number"]).value, str(message["host"])


def note(known: dict[int, LateCall], late: LateCall) -> None:
    """Remember a late call by its number; a note that workers are about to give up stays."""
    if late.call not in known or late.given_up:
        known[late.call] = late


class Peers(Protocol):
    """The launchers of the other hosts, as the workers here see them."""

    verdict: Failure | None  # what ended the job, once all hosts know it
    # the signal by which a launcher was asked to end the job, and its host
    stopped: tuple[int, str] | None
    all_finished: bool  # every worker of every host has ended well
    late: dict[int, LateCall]  # calls in which workers of any host wait for others

    def descriptors(self) -> list[int]: ...
    def hear(self, descriptor: int) -> None: ...
    def tick(self) -> None: ...
    def tell_failed(self, failure: Failure) -> None: ...
    def tell_stopped(self, number: int) -> None: ...
    def tell_finished(self) -> None: ...
    def tell_late(self, late: LateCall) -> None: ...
    def close(self) -> None: ...


class RestartPeers(Peers, Protocol):
    """The launchers of the other hosts, where all may start again together after a failure.

    `state` is how far restarts have come, as the latest of those who met knows; `sequel` what
    follows on the failure, once that is decided.
    """

    state: RestartState | None
    sequel: Sequel | None

    @property
    def ended(self) -> Mapping[int, HostReport] | None:
        """The reports of all hosts that are still there, by number, if this one is to decide and
        all have come; else None.
        """

    def tell_ended(self, report: HostReport) -> None: ...
    def tell_sequel(self, sequel: Sequel) -> None: ...
    def links(self) -> Links | None:
        """Hand over the connections, which `close` keeps where the job starts again; None where
        there are none.
        """


class NoPeers:
    """The peers of a job of one host."""

    def __init__(self) -> None:
        self.verdict: Failure | None = None
        self.stopped: tuple[int, str] | None = None
        self.all_finished = False
        self.late: dict[int, LateCall] = {}
        self.state: RestartState | None = None
        self.sequel: Sequel | None = None
        self.ended: Mapping[int, HostReport] | None = None

    def descriptors(self) -> list[int]:
        return []

    def hear(self, descriptor: int) -> None:
        raise AssertionError(descriptor)

    def tick(self) -> None:
        return

    def tell_failed(self, failure: Failure) -> None:
        self.verdict = failure

    def tell_stopped(self, number: int) -> None:
        return

    def tell_finished(self) -> None:
        self.all_finished = True

    def tell_late(self, late: LateCall) -> None:
        note(self.late, late)

    def close(self) -> None:
        return

    def tell_ended(self, report: HostReport) -> None:
        self.ended = {0: report}

    def tell_sequel(self, sequel: Sequel) -> None:
        self.sequel = sequel

    def links(self) -> None:
        return None
