"""What launchers tell each other: a failure, a call in which workers wait for others, and what each host must hear of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Failure:
    """What ended the job: who, where, how. `rank` is None when a whole host is gone; `age` are seconds since it happened."""

    rank: int | None
    host: str
    code: int
    words: str  # "failed with exit code 1"
    is_echo: bool = False
    age: float = 0.0
    tail: str = ""

    def line(self) -> str:
        who = f"rank {self.rank} on {self.host}" if self.rank is not None else f"host {self.host}"
        return f"paceline: {who} {self.words}"


class Late(NamedTuple):
    """A call in which workers wait for others far longer than usual: its number, its name, and whether they are about to give up."""

    call: int
    what: str
    given_up: bool


def note(known: dict[int, Late], late: Late) -> None:
    """Remember it by its number; that somebody is about to give up stays so."""
    if late.call not in known or late.given_up:
        known[late.call] = late


class Peers(Protocol):
    """The launchers of the other hosts, as the workers here see them."""

    verdict: Failure | None  # what ended the job, once all hosts know it
    stopped: tuple[int, str] | None  # the signal by which a launcher was asked to end the job, and its host
    all_finished: bool  # every worker of every host has ended well
    late: dict[int, Late]  # calls in which workers of any host wait for others

    def descriptors(self) -> list[int]: ...
    def hear(self, descriptor: int) -> None: ...
    def tick(self) -> None: ...
    def tell_failed(self, failure: Failure) -> None: ...
    def tell_stopped(self, number: int) -> None: ...
    def tell_finished(self) -> None: ...
    def tell_late(self, late: Late) -> None: ...
    def close(self) -> None: ...


class Nobody:
    """The peers of a job of one host."""

    def __init__(self) -> None:
        self.verdict: Failure | None = None
        self.stopped: tuple[int, str] | None = None
        self.all_finished = False
        self.late: dict[int, Late] = {}

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

    def tell_late(self, late: Late) -> None:
        note(self.late, late)

    def close(self) -> None:
        return
