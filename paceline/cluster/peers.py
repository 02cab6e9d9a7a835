"""What launchers tell each other: a failure, and what each host must hear of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class Peers(Protocol):
    """The launchers of the other hosts, as the workers here see them."""

    verdict: Failure | None  # what ended the job, once all hosts know it
    stopped: tuple[int, str] | None  # the signal by which a launcher was asked to end the job, and its host
    all_finished: bool  # every worker of every host has ended well

    def descriptors(self) -> list[int]: ...
    def hear(self, descriptor: int) -> None: ...
    def tick(self) -> None: ...
    def tell_failed(self, failure: Failure) -> None: ...
    def tell_stopped(self, number: int) -> None: ...
    def tell_finished(self) -> None: ...
    def close(self) -> None: ...


class Nobody:
    """The peers of a job of one host."""

    def __init__(self) -> None:
        self.verdict: Failure | None = None
        self.stopped: tuple[int, str] | None = None
        self.all_finished = False

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

    def close(self) -> None:
        return
