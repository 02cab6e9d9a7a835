"""Group membership: a numbered view of the living, which a majority of the last one agrees on.

No host decides alone, none is needed.

    view 3: hosts 0 1 2       0 falls silent
    2 --wish: 0 is gone--> 1  the first of the view that is still heard leads
    1 --prepare (1, 1)---> 2  left out by host 0 itself, whose first ballot needs none
    2 --promise----------> 1
    1 --accept (1, 1)----> 2
    2 --accepted---------> 1  two of three: view 4 is 1 2
    1 --decided----------> 2

Each number is decided once, by single-decree Paxos (Lamport 2001, "Paxos Made Simple") among the
hosts of the view before it. There is no input or output here: `hear`, `tick` and the wishes take
what happened, `outbox` has what is to be sent, and nothing is lost if a message is: all that is
open is said again by `tick`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.timings import DEFAULTS, MembershipTimings

Ballot = tuple[int, int]  # the round, and the host that leads it
LOWEST: Ballot = (-1, -1)


@dataclass(frozen=True)
class HostSeat:
    """A host of a view: its number, its workers (numbers that are never used twice), and facts
    that others need of it.
    """

    host: int
    workers: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class View:
    """The living: hosts in the order in which they came.

    `fresh` is the number of the next host that joins.
    """

    number: int
    seats: tuple[HostSeat, ...]
    fresh: int
    renewed: bool = False  # groups of the view before can't be used, whoever lives

    @property
    def hosts(self) -> tuple[int, ...]:
        """The numbers of the hosts."""
        return tuple(seat.host for seat in self.seats)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of all hosts, host by host."""
        return tuple(worker for seat in self.seats for worker in seat.workers)

    def seat(self, host: int) -> HostSeat | None:
        """Return the seat of a host, None if the host is not one of the living."""
        return next((seat for seat in self.seats if seat.host == host), None)

    def carried(self, hosts: Collection[int]) -> bool:
        """Whether these hosts may decide what follows: more than half of all, or half of them
        with the first.
        """
        count = sum(host in hosts for host in self.hosts)
        return 2 * count > len(self.seats) or (
            0 < 2 * count == len(self.seats) and self.hosts[0] in hosts
        )

    def dump(self) -> dict[str, Any]:
        """Write as JSON that `load` reads."""
        seats = [[seat.host, list(seat.workers), seat.facts] for seat in self.seats]
        return {"number": self.number, "seats": seats, "fresh": self.fresh, "renewed": self.renewed}

    @classmethod
    def load(cls, value: dict[str, Any]) -> View:
        """Read what `dump` has written."""
        seats = tuple(
            HostSeat(int(host), tuple(map(int, workers)), dict(facts))
            for host, workers, facts in value["seats"]
        )
        return cls(int(value["number"]), seats, int(value["fresh"]), bool(value["renewed"]))


@dataclass
class PendingChanges:
    """Changes that have happened and that the view doesn't show yet."""

    lost: set[int] = field(default_factory=set)  # workers
    gone: set[int] = field(default_factory=set)  # hosts that are not heard any more
    left: set[int] = field(default_factory=set)  # hosts that have said so themselves
    come: dict[int, int] = field(default_factory=dict)  # worker: its host, which is in the view
    # by a word of the host's own: it has no number yet
    joining: dict[str, HostSeat] = field(default_factory=dict)
    broken: bool = False  # connections of workers have broken that live

    def dump(self) -> dict[str, Any]:
        """Write as JSON that `merge` reads."""
        joining = {word: [list(seat.workers), seat.facts] for word, seat in self.joining.items()}
        return {
            "lost": sorted(self.lost),
            "gone": sorted(self.gone),
            "come": [*map(list, self.come.items())],
            "joining": joining,
        } | {
            "broken": self.broken,
            "left": sorted(self.left),
        }

    def merge(self, said: dict[str, Any]) -> None:
        """Add the changes that another host wishes."""
        self.lost |= set(map(int, said["lost"]))
        self.gone |= set(map(int, said["gone"]))
        self.left |= set(map(int, said["left"]))
        self.broken = self.broken or bool(said["broken"])
        self.come |= {int(worker): int(host) for worker, host in said["come"]}
        self.joining |= {
            str(word): HostSeat(-1, tuple(map(int, workers)), dict(facts))
            for word, (workers, facts) in said["joining"].items()
        }

    def forget(self, view: View) -> None:
        """Drop the changes that this view shows, or that can't come about any more."""
        self.lost &= set(view.workers) | {
            worker for worker in self.come if view.seat(self.come[worker]) is not None
        }
        self.gone &= set(view.hosts)
        self.left &= set(view.hosts)
        self.come = {
            worker: host
            for worker, host in self.come.items()
            if worker not in view.workers and view.seat(host) and worker not in self.lost
        }
        here = {seat.facts.get("word") for seat in view.seats}
        self.joining = {word: seat for word, seat in self.joining.items() if word not in here}

    def __bool__(self) -> bool:
        return bool(self.lost or self.gone or self.left or self.come or self.joining or self.broken)


def follow(view: View, wishes: PendingChanges) -> View:
    """Make the view after this one, in which the wishes are fulfilled.

    A host without workers stays, as it may get some.
    """
    seats = []
    for seat in view.seats:
        if seat.host in wishes.gone | wishes.left:
            continue
        come = [
            worker
            for worker, host in wishes.come.items()
            if host == seat.host and worker not in seat.workers
        ]
        seats.append(
            HostSeat(
                seat.host,
                tuple(worker for worker in (*seat.workers, *come) if worker not in wishes.lost),
                seat.facts,
            )
        )
    fresh = view.fresh
    for word, seat in sorted(wishes.joining.items()):
        seats.append(HostSeat(fresh, seat.workers, {**seat.facts, "word": word}))
        fresh += 1
    return View(view.number + 1, tuple(seats), fresh, wishes.broken)


class Membership:
    """One host's part in agreeing on views.

    `view` is the last one known to be decided, `expelled` whether it leaves this host out,
    `stranded` whether those that are heard are too few to decide anything. `outbox` holds (host,
    message) to be sent; messages are JSON, and may get lost or come twice.
    """

    def __init__(
        self,
        host: int,
        view: View,
        *,
        now: float = 0.0,
        timings: MembershipTimings = DEFAULTS.membership,
    ) -> None:
        self.host, self.view = host, view
        self.expelled = False
        self.outbox: list[tuple[int, dict[str, Any]]] = []
        # in the order in which they became known here; the caller takes them out
        self.decided: list[View] = []
        self._wishes = PendingChanges()
        self._silent: set[int] = set()
        self._said_at, self._timings = now, timings
        self._open(now)

    def _open(self, now: float) -> None:
        """Forget all ballots: nothing is known yet of the view after the present one."""
        first: Ballot = (0, self.view.hosts[0]) if self.view.seats else LOWEST
        self._promised, self._accepted, self._value = first, LOWEST, dict[str, Any]()
        self._mine: Ballot | None = None  # the ballot that this host leads
        self._proposed = dict[str, Any]()
        self._promises: dict[int, tuple[Ballot, dict[str, Any]]] = {}
        self._votes: set[int] = set()
        self._round, self._led_at, self._patience = 0, now, self._timings.ballot

    # ---- what this host has seen

    @property
    def stranded(self) -> bool:
        """Whether this host hears too few of the view to go on."""
        return self.expelled or not self.view.carried(set(self.view.hosts) - self._silent)

    @property
    def leader(self) -> int:
        """The host that is to bring about the next view, as far as this host hears."""
        return next((host for host in self.view.hosts if host not in self._silent), self.host)

    def lost(self, workers: Iterable[int], now: float) -> None:
        """Note that workers of this host are dead, or leave."""
        self._wishes.lost |= set(workers)
        self._press(now)

    def come(self, workers: Iterable[int], now: float) -> None:
        """Note that this host has new workers that are ready to take part."""
        self._wishes.come |= dict.fromkeys(workers, self.host)
        self._press(now)

    def renew(self, number: int, now: float) -> None:
        """Note that living workers have lost a connection in the view `number`: they need
        another view to make new groups in.
        """
        if number == self.view.number:
            self._wishes.broken = True
            self._press(now)

    def joining(self, word: str, workers: Sequence[int], facts: dict[str, Any], now: float) -> None:
        """Note that a new host wants to take part; `word` tells it from all others."""
        self._wishes.joining[word] = HostSeat(-1, tuple(workers), facts)
        self._press(now)

    def leave(self, now: float) -> None:
        """Announce that this host goes, once the others have decided to do without it: it
        needn't hear what follows.
        """
        self._wishes.left |= {self.host}
        self._press(now)

    def silent(self, host: int, now: float) -> None:
        """Note that nothing is heard of this host any more."""
        if host != self.host and host in self.view.hosts and host not in self._silent:
            self._silent.add(host)
            self._wishes.gone.add(host)
            self._press(now)

    def heard(self, host: int) -> None:
        """Note that this host is heard again. What has been proposed of it goes on."""
        self._silent.discard(host)
        self._wishes.gone.discard(host)

    # ---- the protocol

    def tick(self, now: float) -> None:
        """Repeat what has had no answer, and announce the number of this view: a host that is
        behind hears of the next.
        """
        if now - self._said_at >= self._timings.repeat:
            for host in self.view.hosts if not self.expelled else ():
                if host != self.host:
                    self._send(host, {"kind": "at", "number": self.view.number + 1})
            self._press(now)

    def hear(self, sender: int, message: dict[str, Any], now: float) -> None:
        """Handle a message of another host (or of this one)."""
        kind = message["kind"]
        if kind == "decided":
            self._adopt(View.load(message["view"]), now)
            return
        number = int(message["number"])
        if number <= self.view.number:
            self._send(sender, {"kind": "decided", "view": self.view.dump()})
        elif number > self.view.number + 1:
            self._send(sender, {"kind": "behind", "number": self.view.number + 1})
        elif kind == "wish":
            self._wishes.merge(message["wishes"])
            self._wishes.gone -= {self.host}
            if self._wishes and self.leader == self.host and self._mine is None:
                self._lead(now)
        elif kind in ("prepare", "accept"):
            self._answer(sender, message)
        elif kind == "refused":
            self._round = max(self._round, int(message["ballot"][0]))
        elif (
            kind in ("promise", "accepted")
            and self._mine is not None
            and _ballot(message["ballot"]) == self._mine
        ):
            if kind == "promise":
                self._promises[sender] = (_ballot(message["accepted"]), message["value"])
                self._propose(now)
            elif kind == "accepted":
                self._votes.add(sender)
                self._count(now)

    def _press(self, now: float) -> None:
        """Bring the next view about, or ask the leader to do so."""
        self._said_at = now
        self._wishes.forget(self.view)
        if self.expelled or not (self._wishes or self._mine):
            return
        if self.leader != self.host:
            self._send(
                self.leader,
                {"kind": "wish", "number": self.view.number + 1, "wishes": self._wishes.dump()},
            )
        elif self._mine is None or now - self._led_at >= self._patience:
            self._lead(now)
        else:
            self._repeat()

    def _lead(self, now: float) -> None:
        """Begin a ballot."""
        self._led_at = now
        self._promises, self._votes = {}, set()
        if self._mine is None and self._promised == (0, self.host):
            self._mine = (0, self.host)
            self._propose(now)
            return
        if self._mine is not None:
            self._patience = min(2 * self._patience, self._timings.longest_ballot)
        self._round = max(self._round, self._promised[0]) + 1
        self._mine, self._proposed = (self._round, self.host), {}
        self._repeat()

    def _repeat(self) -> None:
        """Send the state of this host's ballot again."""
        assert self._mine is not None
        said: dict[str, Any] = (
            {"kind": "accept", "value": self._proposed} if self._proposed else {"kind": "prepare"}
        )
        said |= {"number": self.view.number + 1, "ballot": list(self._mine)}
        # this host's own answer may decide it
        for host in [host for host in self.view.hosts if host not in self._votes]:
            self._send(host, said)

    def _propose(self, now: float) -> None:
        """Put a value to the vote: one that may have been decided already, or else what is
        wished for.
        """
        assert self._mine is not None
        if self._proposed or (self._mine[0] > 0 and not self.view.carried(self._promises)):
            return
        known = max(self._promises.values(), key=lambda promise: promise[0], default=(LOWEST, {}))
        self._proposed = known[1] or follow(self.view, self._wishes).dump()
        self._led_at = now
        self._repeat()

    def _answer(self, sender: int, message: dict[str, Any]) -> None:
        ballot = _ballot(message["ballot"])
        head = {"number": message["number"], "ballot": list(ballot)}
        if ballot < self._promised:
            self._send(sender, {**head, "kind": "refused", "ballot": list(self._promised)})
            return
        self._promised = ballot
        if message["kind"] == "prepare":
            self._send(
                sender,
                {**head, "kind": "promise", "accepted": list(self._accepted), "value": self._value},
            )
        else:
            self._accepted, self._value = ballot, message["value"]
            self._send(sender, {**head, "kind": "accepted"})

    def _count(self, now: float) -> None:
        if not self.view.carried(self._votes):
            return
        view = View.load(self._proposed)
        for host in sorted({*self.view.hosts, *view.hosts} - {self.host}):
            self._send(host, {"kind": "decided", "view": self._proposed})
        self._adopt(view, now)

    def _adopt(self, view: View, now: float) -> None:
        if view.number <= self.view.number:
            return
        self.view = view
        self.expelled = view.seat(self.host) is None
        self._silent &= set(view.hosts)
        self._wishes.gone = set(self._silent)
        self._wishes.broken = False
        self.decided.append(view)
        self._open(now)
        self._press(now)

    def _send(self, host: int, message: dict[str, Any]) -> None:
        if host == self.host:
            self.hear(host, message, self._said_at)
        else:
            self.outbox.append((host, message))


def _ballot(value: Sequence[int]) -> Ballot:
    return int(value[0]), int(value[1])
