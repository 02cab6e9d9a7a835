"""Group membership: numbered views of the hosts that are alive, each agreed on by a majority.

No host decides alone, and no host is indispensable.

    view 3: hosts 0 1 2       0 falls silent
    2 --wish: 0 is gone--> 1  the first host of the view that is still heard leads
    1 --prepare (1, 1)---> 2  host 0 itself would skip this: its first ballot needs no promises
    2 --promise----------> 1
    1 --accept (1, 1)----> 2
    2 --accepted---------> 1  two of three: view 4 is 1 2
    1 --decided----------> 2

Each number is decided once, by single-decree Paxos (Lamport 2001, "Paxos Made Simple") among the
hosts of the view before it. There is no input or output here: `note_...` take events,
`handle_message` takes messages, and `outbox` holds the messages to send. Messages may be lost, as
`run_timers` repeats all that are still unanswered.
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
    """A host of a view: its number, its workers, and facts that other hosts need.

    The numbers of workers are never used twice.
    """

    host: int
    workers: tuple[int, ...]
    facts: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class View:
    """The hosts that are alive, in the order in which they came.

    `next_host` is the number of the next host that joins.
    """

    number: int
    seats: tuple[HostSeat, ...]
    fresh: int
    renewed: bool = False  # groups of the view before can't be used, even if all members stay

    @property
    def hosts(self) -> tuple[int, ...]:
        """Numbers of the hosts."""
        return tuple(seat.host for seat in self.seats)

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of all hosts, host by host."""
        return tuple(worker for seat in self.seats for worker in seat.workers)

    def seat(self, host: int) -> HostSeat | None:
        """The seat of a host; None if the host isn't in the view."""
        return next((seat for seat in self.seats if seat.host == host), None)

    def carried(self, hosts: Collection[int]) -> bool:
        """Whether these hosts are a majority, and so may decide the next view.

        A majority is more than half of all hosts, or exactly half with the first host among them.
        """
        present = sum(host in hosts for host in self.hosts)
        return 2 * present > len(self.seats) or (
            0 < 2 * present == len(self.seats) and self.hosts[0] in hosts
        )

    def dump(self) -> dict[str, Any]:
        """Write the view as JSON for `load`."""
        seats = [[seat.host, list(seat.workers), seat.facts] for seat in self.seats]
        return {"number": self.number, "seats": seats, "fresh": self.fresh, "renewed": self.renewed}

    @classmethod
    def load(cls, value: dict[str, Any]) -> View:
        """Read a view that `dump` has written."""
        seats = tuple(
            HostSeat(int(host), tuple(map(int, workers)), dict(facts))
            for host, workers, facts in value["seats"]
        )
        return cls(int(value["number"]), seats, int(value["fresh"]), bool(value["renewed"]))


@dataclass
class PendingChanges:
    """Changes that have happened, and that the view doesn't show yet."""

    lost: set[int] = field(default_factory=set)  # workers that are dead
    gone: set[int] = field(default_factory=set)  # hosts that are silent
    left: set[int] = field(default_factory=set)  # hosts that have announced that they leave
    come: dict[int, int] = field(default_factory=dict)  # new workers, and their hosts in the view
    # New hosts. They have no numbers yet, so each is named by a random word.
    joining: dict[str, HostSeat] = field(default_factory=dict)
    broken: bool = False  # connections between live workers have broken

    def dump(self) -> dict[str, Any]:
        """Write the changes as JSON for `merge`."""
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

    def merge(self, dumped: dict[str, Any]) -> None:
        """Add the changes that another host wishes for."""
        self.lost |= set(map(int, dumped["lost"]))
        self.gone |= set(map(int, dumped["gone"]))
        self.left |= set(map(int, dumped["left"]))
        self.broken = self.broken or bool(dumped["broken"])
        self.come |= {int(worker): int(host) for worker, host in dumped["come"]}
        self.joining |= {
            str(word): HostSeat(-1, tuple(map(int, workers)), dict(facts))
            for word, (workers, facts) in dumped["joining"].items()
        }

    def forget(self, view: View) -> None:
        """Drop the changes that this view shows, or that can't happen any more."""
        # A lost worker stays noted while it is in the view, or may still be admitted.
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
        admitted = {seat.facts.get("word") for seat in view.seats}
        self.joining = {word: seat for word, seat in self.joining.items() if word not in admitted}

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
        new_workers = [
            worker
            for worker, host in wishes.come.items()
            if host == seat.host and worker not in seat.workers
        ]
        workers = (*seat.workers, *new_workers)
        live_workers = tuple(worker for worker in workers if worker not in wishes.lost)
        seats.append(HostSeat(seat.host, live_workers, seat.facts))
    fresh = view.fresh
    for word, seat in sorted(wishes.joining.items()):
        seats.append(HostSeat(fresh, seat.workers, {**seat.facts, "word": word}))
        fresh += 1
    return View(view.number + 1, tuple(seats), fresh, wishes.broken)


class Membership:
    """One host's part in agreeing on views.

    `view` is the last view known to be decided. `is_expelled` tells that it leaves this host out,
    and `is_stranded` that too few of its hosts are heard to decide anything. `outbox` holds pairs
    of a host and a message for it, as JSON. Messages may get lost, or come twice.

    Invariants of one ballot, as in Paxos: `_promised_ballot` never falls. `_accepted_ballot` and
    `_accepted_view` are the last ballot that this host has voted for, and its view. `_own_ballot`
    is the ballot that this host leads, None if it leads none; `_promises` and `_votes` are the
    answers to it, and `_proposed_view` its view as soon as that is settled. All of them are reset
    when a view is adopted.

    Args:
        host: Number of this host.
        view: The present view.
        now: Present time in seconds, from any start.
        timings: How often to repeat messages, and how long ballots last.
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
        # Views in the order in which this host learned of them. The caller takes them out.
        self.decided: list[View] = []
        self._wishes = PendingChanges()
        self._silent: set[int] = set()
        self._said_at, self._timings = now, timings
        self._open(now)

    def _open(self, now: float) -> None:
        """Forget all ballots, and begin with those for the next view."""
        # All hosts count as having promised round 0 to the first host of the view, so that host can
        # skip the first phase of Paxos.
        first: Ballot = (0, self.view.hosts[0]) if self.view.seats else LOWEST
        self._promised, self._accepted, self._value = first, LOWEST, dict[str, Any]()
        self._mine: Ballot | None = None
        self._proposed = dict[str, Any]()
        self._promises: dict[int, tuple[Ballot, dict[str, Any]]] = {}
        self._votes: set[int] = set()
        self._round, self._led_at, self._patience = 0, now, self._timings.ballot

    # ---- events that this host has seen

    @property
    def stranded(self) -> bool:
        """Whether this host hears too few hosts of the view to go on."""
        return self.expelled or not self.view.carried(set(self.view.hosts) - self._silent)

    @property
    def leader(self) -> int:
        """The host that should lead the next ballot, as far as this host hears."""
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
        """Note that live workers have lost a connection in the view `number`.

        They need another view, in which they make new groups.
        """
        if number == self.view.number:
            self._wishes.broken = True
            self._press(now)

    def joining(self, word: str, workers: Sequence[int], facts: dict[str, Any], now: float) -> None:
        """Note that a new host wants to take part. `word` names it until it has a number."""
        self._wishes.joining[word] = HostSeat(-1, tuple(workers), facts)
        self._press(now)

    def leave(self, now: float) -> None:
        """Announce that this host leaves as soon as the others have decided to go on without it.

        It doesn't have to hear of that decision.
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
        """Note that this host is heard again. A ballot on leaving it out goes on."""
        self._silent.discard(host)
        self._wishes.gone.discard(host)

    # ---- the protocol

    def tick(self, now: float) -> None:
        """Repeat unanswered messages, and announce the number of the next view.

        By that number a host that is ahead notices that this one is behind, and sends its view.
        """
        if now - self._said_at >= self._timings.repeat:
            for host in self.view.hosts if not self.expelled else ():
                if host != self.host:
                    self._send(host, {"kind": "at", "number": self.view.number + 1})
            self._press(now)

    def hear(self, sender: int, message: dict[str, Any], now: float) -> None:
        """Handle a message of another host, or of this one."""
        kind = message["kind"]
        if kind == "decided":
            self._adopt(View.load(message["view"]), now)
            return
        # All other messages are about one view. Only those about the next view are answered by the
        # rules of the ballot; in all other cases one side is behind, and gets the decided view.
        number = int(message["number"])
        if number <= self.view.number:
            self._send(sender, {"kind": "decided", "view": self.view.dump()})
        elif number > self.view.number + 1:
            self._send(sender, {"kind": "behind", "number": self.view.number + 1})
        elif kind == "wish":
            self._wishes.merge(message["wishes"])
            self._wishes.gone -= {self.host}  # the other may have missed this host's messages
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
        """Work towards the next view: lead a ballot, or ask the leader to do so."""
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
        """Begin a ballot.

        The first host of the view needs no promises in round 0. In any later round, other hosts may
        have voted already, so promises come first.
        """
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
        message: dict[str, Any] = (
            {"kind": "accept", "value": self._proposed} if self._proposed else {"kind": "prepare"}
        )
        message |= {"number": self.view.number + 1, "ballot": list(self._mine)}
        # This host answers itself at once, and that may decide the ballot, so the list is a copy.
        for host in [host for host in self.view.hosts if host not in self._votes]:
            self._send(host, message)

    def _propose(self, now: float) -> None:
        """Put a view to the vote, if a majority has promised.

        If any of them has voted before, it has to be the view of the latest ballot, as that may
        have been decided. Otherwise it is the one that is wished for.
        """
        assert self._mine is not None
        if self._proposed or (self._mine[0] > 0 and not self.view.carried(self._promises)):
            return
        latest = max(self._promises.values(), key=lambda promise: promise[0], default=(LOWEST, {}))
        self._proposed = latest[1] or follow(self.view, self._wishes).dump()
        self._led_at = now
        self._repeat()

    def _answer(self, sender: int, message: dict[str, Any]) -> None:
        """Answer a ballot, unless a higher one was promised."""
        ballot = _ballot(message["ballot"])
        answer = {"number": message["number"], "ballot": list(ballot)}
        if ballot < self._promised:
            self._send(sender, {**answer, "kind": "refused", "ballot": list(self._promised)})
            return
        self._promised = ballot
        if message["kind"] == "prepare":
            # The leader must know what this host has voted for, as that may have been decided.
            vote = {"accepted": list(self._accepted), "value": self._value}
            self._send(sender, {**answer, "kind": "promise", **vote})
        else:
            self._accepted, self._value = ballot, message["value"]
            self._send(sender, {**answer, "kind": "accepted"})

    def _count(self, now: float) -> None:
        """Adopt the proposed view if a majority has voted for it, and tell all its hosts."""
        if not self.view.carried(self._votes):
            return
        view = View.load(self._proposed)
        for host in sorted({*self.view.hosts, *view.hosts} - {self.host}):
            self._send(host, {"kind": "decided", "view": self._proposed})
        self._adopt(view, now)

    def _adopt(self, view: View, now: float) -> None:
        """Take over a decided view, unless it is known already."""
        if view.number <= self.view.number:
            return
        self.view = view
        self.expelled = view.seat(self.host) is None
        # Silent hosts are still to be left out. Broken connections don't matter any more, as a new
        # view makes all its groups anew.
        self._silent &= set(view.hosts)
        self._wishes.gone = set(self._silent)
        self._wishes.broken = False
        self.decided.append(view)
        self._open(now)
        self._press(now)

    def _send(self, host: int, message: dict[str, Any]) -> None:
        """Put a message into the outbox. This host handles its own messages at once."""
        if host == self.host:
            self.hear(host, message, self._said_at)
        else:
            self.outbox.append((host, message))


def _ballot(value: Sequence[int]) -> Ballot:
    return int(value[0]), int(value[1])
