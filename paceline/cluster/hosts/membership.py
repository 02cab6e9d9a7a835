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

from paceline.timings import DEFAULT_TIMINGS, MembershipTimings

Ballot = tuple[int, int]  # the round, and the host that leads it
LOWEST_BALLOT: Ballot = (-1, -1)


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
    next_host: int
    is_renewed: bool = False  # groups of the view before can't be used, even if all members stay

    @property
    def hosts(self) -> tuple[int, ...]:
        """Numbers of the hosts."""
        return tuple(seat.host for seat in self.seats)

    @property
    def workers(self) -> tuple[int, ...]:
        """Workers of all hosts, host by host."""
        return tuple(worker for seat in self.seats for worker in seat.workers)

    def find_seat(self, host: int) -> HostSeat | None:
        """The seat of a host; None if the host isn't in the view."""
        return next((seat for seat in self.seats if seat.host == host), None)

    def has_majority(self, hosts: Collection[int]) -> bool:
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
        return {
            "number": self.number,
            "seats": seats,
            "fresh": self.next_host,
            "renewed": self.is_renewed,
        }

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

    lost_workers: set[int] = field(default_factory=set)  # workers that are dead
    silent_hosts: set[int] = field(default_factory=set)  # hosts that are silent
    leaving_hosts: set[int] = field(
        default_factory=set
    )  # hosts that have announced that they leave
    new_workers: dict[int, int] = field(
        default_factory=dict
    )  # new workers, and their hosts in the view
    # New hosts. They have no numbers yet, so each is named by a random word.
    joining_hosts: dict[str, HostSeat] = field(default_factory=dict)
    has_broken_groups: bool = False  # connections between live workers have broken

    def dump(self) -> dict[str, Any]:
        """Write the changes as JSON for `merge`."""
        joining = {
            word: [list(seat.workers), seat.facts] for word, seat in self.joining_hosts.items()
        }
        return {
            "lost": sorted(self.lost_workers),
            "gone": sorted(self.silent_hosts),
            "come": [*map(list, self.new_workers.items())],
            "joining": joining,
        } | {
            "broken": self.has_broken_groups,
            "left": sorted(self.leaving_hosts),
        }

    def merge(self, dumped: dict[str, Any]) -> None:
        """Add the changes that another host wishes for."""
        self.lost_workers |= set(map(int, dumped["lost"]))
        self.silent_hosts |= set(map(int, dumped["gone"]))
        self.leaving_hosts |= set(map(int, dumped["left"]))
        self.has_broken_groups = self.has_broken_groups or bool(dumped["broken"])
        self.new_workers |= {int(worker): int(host) for worker, host in dumped["come"]}
        self.joining_hosts |= {
            str(word): HostSeat(-1, tuple(map(int, workers)), dict(facts))
            for word, (workers, facts) in dumped["joining"].items()
        }

    def drop_fulfilled(self, view: View) -> None:
        """Drop the changes that this view shows, or that can't happen any more."""
        # A lost worker stays noted while it is in the view, or may still be admitted.
        self.lost_workers &= set(view.workers) | {
            worker
            for worker in self.new_workers
            if view.find_seat(self.new_workers[worker]) is not None
        }
        self.silent_hosts &= set(view.hosts)
        self.leaving_hosts &= set(view.hosts)
        self.new_workers = {
            worker: host
            for worker, host in self.new_workers.items()
            if worker not in view.workers
            and view.find_seat(host)
            and worker not in self.lost_workers
        }
        admitted = {seat.facts.get("word") for seat in view.seats}
        self.joining_hosts = {
            word: seat for word, seat in self.joining_hosts.items() if word not in admitted
        }

    def __bool__(self) -> bool:
        return bool(
            self.lost_workers
            or self.silent_hosts
            or self.leaving_hosts
            or self.new_workers
            or self.joining_hosts
            or self.has_broken_groups
        )


def make_next_view(view: View, wishes: PendingChanges) -> View:
    """Make the view after this one, in which the wishes are fulfilled.

    A host without workers stays, as it may get some.
    """
    seats = []
    for seat in view.seats:
        if seat.host in wishes.silent_hosts | wishes.leaving_hosts:
            continue
        new_workers = [
            worker
            for worker, host in wishes.new_workers.items()
            if host == seat.host and worker not in seat.workers
        ]
        workers = (*seat.workers, *new_workers)
        live_workers = tuple(worker for worker in workers if worker not in wishes.lost_workers)
        seats.append(HostSeat(seat.host, live_workers, seat.facts))
    fresh = view.next_host
    for word, seat in sorted(wishes.joining_hosts.items()):
        seats.append(HostSeat(fresh, seat.workers, {**seat.facts, "word": word}))
        fresh += 1
    return View(view.number + 1, tuple(seats), fresh, wishes.has_broken_groups)


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
        timings: MembershipTimings = DEFAULT_TIMINGS.membership,
    ) -> None:
        self.host, self.view = host, view
        self.is_expelled = False
        self.outbox: list[tuple[int, dict[str, Any]]] = []
        # Views in the order in which this host learned of them. The caller takes them out.
        self.decided_views: list[View] = []
        self._wishes = PendingChanges()
        self._silent_hosts: set[int] = set()
        self._repeated_at, self._timings = now, timings
        self._reset_ballots(now)

    def _reset_ballots(self, now: float) -> None:
        """Forget all ballots, and begin with those for the next view."""
        # All hosts count as having promised round 0 to the first host of the view, so that host can
        # skip the first phase of Paxos.
        first: Ballot = (0, self.view.hosts[0]) if self.view.seats else LOWEST_BALLOT
        self._promised_ballot, self._accepted_ballot, self._accepted_view = (
            first,
            LOWEST_BALLOT,
            dict[str, Any](),
        )
        self._own_ballot: Ballot | None = None
        self._proposed_view = dict[str, Any]()
        self._promises: dict[int, tuple[Ballot, dict[str, Any]]] = {}
        self._votes: set[int] = set()
        self._highest_round, self._ballot_began_at, self._ballot_seconds = (
            0,
            now,
            self._timings.ballot,
        )

    # ---- events that this host has seen

    @property
    def is_stranded(self) -> bool:
        """Whether this host hears too few hosts of the view to go on."""
        return self.is_expelled or not self.view.has_majority(
            set(self.view.hosts) - self._silent_hosts
        )

    @property
    def leading_host(self) -> int:
        """The host that should lead the next ballot, as far as this host hears."""
        return next((host for host in self.view.hosts if host not in self._silent_hosts), self.host)

    def note_lost_workers(self, workers: Iterable[int], now: float) -> None:
        """Note that workers of this host are dead, or leave."""
        self._wishes.lost_workers |= set(workers)
        self._seek_next_view(now)

    def note_new_workers(self, workers: Iterable[int], now: float) -> None:
        """Note that this host has new workers that are ready to take part."""
        self._wishes.new_workers |= dict.fromkeys(workers, self.host)
        self._seek_next_view(now)

    def request_renewal(self, number: int, now: float) -> None:
        """Note that live workers have lost a connection in the view `number`.

        They need another view, in which they make new groups.
        """
        if number == self.view.number:
            self._wishes.has_broken_groups = True
            self._seek_next_view(now)

    def note_joining_host(
        self, word: str, workers: Sequence[int], facts: dict[str, Any], now: float
    ) -> None:
        """Note that a new host wants to take part. `word` names it until it has a number."""
        self._wishes.joining_hosts[word] = HostSeat(-1, tuple(workers), facts)
        self._seek_next_view(now)

    def announce_leaving(self, now: float) -> None:
        """Announce that this host leaves as soon as the others have decided to go on without it.

        It doesn't have to hear of that decision.
        """
        self._wishes.leaving_hosts |= {self.host}
        self._seek_next_view(now)

    def note_silent_host(self, host: int, now: float) -> None:
        """Note that nothing is heard of this host any more."""
        if host != self.host and host in self.view.hosts and host not in self._silent_hosts:
            self._silent_hosts.add(host)
            self._wishes.silent_hosts.add(host)
            self._seek_next_view(now)

    def note_heard_host(self, host: int) -> None:
        """Note that this host is heard again. A ballot on leaving it out goes on."""
        self._silent_hosts.discard(host)
        self._wishes.silent_hosts.discard(host)

    # ---- the protocol

    def run_timers(self, now: float) -> None:
        """Repeat unanswered messages, and announce the number of the next view.

        By that number a host that is ahead notices that this one is behind, and sends its view.
        """
        if now - self._repeated_at >= self._timings.repeat:
            for host in self.view.hosts if not self.is_expelled else ():
                if host != self.host:
                    self._send_message(host, {"kind": "at", "number": self.view.number + 1})
            self._seek_next_view(now)

    def handle_message(self, sender: int, message: dict[str, Any], now: float) -> None:
        """Handle a message of another host, or of this one."""
        kind = message["kind"]
        if kind == "decided":
            self._adopt_view(View.load(message["view"]), now)
            return
        # All other messages are about one view. Only those about the next view are answered by the
        # rules of the ballot; in all other cases one side is behind, and gets the decided view.
        number = int(message["number"])
        if number <= self.view.number:
            self._send_message(sender, {"kind": "decided", "view": self.view.dump()})
        elif number > self.view.number + 1:
            self._send_message(sender, {"kind": "behind", "number": self.view.number + 1})
        elif kind == "wish":
            self._wishes.merge(message["wishes"])
            self._wishes.silent_hosts -= {
                self.host
            }  # the other may have missed this host's messages
            if self._wishes and self.leading_host == self.host and self._own_ballot is None:
                self._lead_ballot(now)
        elif kind in ("prepare", "accept"):
            self._answer_ballot(sender, message)
        elif kind == "refused":
            self._highest_round = max(self._highest_round, int(message["ballot"][0]))
        elif (
            kind in ("promise", "accepted")
            and self._own_ballot is not None
            and _read_ballot(message["ballot"]) == self._own_ballot
        ):
            if kind == "promise":
                self._promises[sender] = (_read_ballot(message["accepted"]), message["value"])
                self._propose_view(now)
            elif kind == "accepted":
                self._votes.add(sender)
                self._count_votes(now)

    def _seek_next_view(self, now: float) -> None:
        """Work towards the next view: lead a ballot, or ask the leader to do so."""
        self._repeated_at = now
        self._wishes.drop_fulfilled(self.view)
        if self.is_expelled or not (self._wishes or self._own_ballot):
            return
        if self.leading_host != self.host:
            self._send_message(
                self.leading_host,
                {"kind": "wish", "number": self.view.number + 1, "wishes": self._wishes.dump()},
            )
        elif self._own_ballot is None or now - self._ballot_began_at >= self._ballot_seconds:
            self._lead_ballot(now)
        else:
            self._repeat_ballot()

    def _lead_ballot(self, now: float) -> None:
        """Begin a ballot.

        The first host of the view needs no promises in round 0. In any later round, other hosts may
        have voted already, so promises come first.
        """
        self._ballot_began_at = now
        self._promises, self._votes = {}, set()
        if self._own_ballot is None and self._promised_ballot == (0, self.host):
            self._own_ballot = (0, self.host)
            self._propose_view(now)
            return
        if self._own_ballot is not None:
            self._ballot_seconds = min(2 * self._ballot_seconds, self._timings.longest_ballot)
        self._highest_round = max(self._highest_round, self._promised_ballot[0]) + 1
        self._own_ballot, self._proposed_view = (self._highest_round, self.host), {}
        self._repeat_ballot()

    def _repeat_ballot(self) -> None:
        """Send the state of this host's ballot again."""
        assert self._own_ballot is not None
        message: dict[str, Any] = (
            {"kind": "accept", "value": self._proposed_view}
            if self._proposed_view
            else {"kind": "prepare"}
        )
        message |= {"number": self.view.number + 1, "ballot": list(self._own_ballot)}
        # This host answers itself at once, and that may decide the ballot, so the list is a copy.
        for host in [host for host in self.view.hosts if host not in self._votes]:
            self._send_message(host, message)

    def _propose_view(self, now: float) -> None:
        """Put a view to the vote, if a majority has promised.

        If any of them has voted before, it has to be the view of the latest ballot, as that may
        have been decided. Otherwise it is the one that is wished for.
        """
        assert self._own_ballot is not None
        if self._proposed_view or (
            self._own_ballot[0] > 0 and not self.view.has_majority(self._promises)
        ):
            return
        latest = max(
            self._promises.values(), key=lambda promise: promise[0], default=(LOWEST_BALLOT, {})
        )
        self._proposed_view = latest[1] or make_next_view(self.view, self._wishes).dump()
        self._ballot_began_at = now
        self._repeat_ballot()

    def _answer_ballot(self, sender: int, message: dict[str, Any]) -> None:
        """Answer a ballot, unless a higher one was promised."""
        ballot = _read_ballot(message["ballot"])
        answer = {"number": message["number"], "ballot": list(ballot)}
        if ballot < self._promised_ballot:
            self._send_message(
                sender, {**answer, "kind": "refused", "ballot": list(self._promised_ballot)}
            )
            return
        self._promised_ballot = ballot
        if message["kind"] == "prepare":
            # The leader must know what this host has voted for, as that may have been decided.
            vote = {"accepted": list(self._accepted_ballot), "value": self._accepted_view}
            self._send_message(sender, {**answer, "kind": "promise", **vote})
        else:
            self._accepted_ballot, self._accepted_view = ballot, message["value"]
            self._send_message(sender, {**answer, "kind": "accepted"})

    def _count_votes(self, now: float) -> None:
        """Adopt the proposed view if a majority has voted for it, and tell all its hosts."""
        if not self.view.has_majority(self._votes):
            return
        view = View.load(self._proposed_view)
        for host in sorted({*self.view.hosts, *view.hosts} - {self.host}):
            self._send_message(host, {"kind": "decided", "view": self._proposed_view})
        self._adopt_view(view, now)

    def _adopt_view(self, view: View, now: float) -> None:
        """Take over a decided view, unless it is known already."""
        if view.number <= self.view.number:
            return
        self.view = view
        self.is_expelled = view.find_seat(self.host) is None
        # Silent hosts are still to be left out. Broken connections don't matter any more, as a new
        # view makes all its groups anew.
        self._silent_hosts &= set(view.hosts)
        self._wishes.silent_hosts = set(self._silent_hosts)
        self._wishes.has_broken_groups = False
        self.decided_views.append(view)
        self._reset_ballots(now)
        self._seek_next_view(now)

    def _send_message(self, host: int, message: dict[str, Any]) -> None:
        """Put a message into the outbox. This host handles its own messages at once."""
        if host == self.host:
            self.handle_message(host, message, self._repeated_at)
        else:
            self.outbox.append((host, message))


def _read_ballot(value: Sequence[int]) -> Ballot:
    return int(value[0]), int(value[1])
