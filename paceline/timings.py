"""Timings: how long the parts of a job wait for each other, as one frozen value that is given down
from where a process begins.

    launcher, worker, server   cluster.discover.timings() --> Timings --> constructors of what waits

All are seconds. Users don't set them; what users set (`deadline`, `patience`, `late_after`) is an
argument of its own. Tests may run jobs with shorter ones: PACELINE_TIMINGS then holds what differs,
as JSON such as {"membership": {"silence": 0.5}}, for all processes of a job.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class ChannelTimings:
    """Timings of a connection between two launchers."""

    hello: float = 4.0  # for the other side to prove that it knows the secret
    flush: float = 1.0  # for a refusal to leave, before a connection is closed
    # at most for the last messages of a job to be acknowledged: a network may have been down for
    # seconds before
    linger: float = 8.0
    look: float = 0.25  # between two looks of a launcher that waits for others to call


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings of launchers that meet, and of a job of fixed size afterwards."""

    # between the first two tries to reach the meeting point, and twice as long each time
    shortest_retry: float = 0.05
    longest_retry: float = 0.5  # at most between two tries
    connect: float = 3.0  # at most for one try
    # that a host waits longer than the one that listens, which gives up first and says why
    verdict: float = 2.0
    reminder: float = 1.0  # until a launcher says for whom it waits
    next_reminder: float = 10.0  # until it says so again
    # in which a running job finds a newcomer that waits at its meeting point
    invitation: float = 4.0
    beat: float = 1.0  # between two heartbeats
    silence: float = 15.0  # a launcher of which nothing is heard for so long is gone
    culprit: float = 0.5  # that the first failure waits for an earlier one from another host
    # the same, when the first failure says itself that another worker is to blame
    echo: float = 1.5


@dataclass(frozen=True)
class MembershipTimings:
    """Timings of launchers that decide who takes part in a job that survives losses."""

    beat: float = 0.5  # between two heartbeats
    silence: float = 2.5  # a launcher of which nothing is heard for so long counts as lost
    call: float = 5.0  # for a host that is new in the view to call
    repeat: float = 0.2  # until a message that has no answer is sent again
    # until a ballot that rests is followed by a higher one, which gets twice as long
    ballot: float = 0.3
    longest_ballot: float = 5.0  # at most for a ballot
    # between two visits to the meeting point: to listen there, or to find somebody who waits
    visit: float = 1.0
    visited: float = 1.0  # for the answer there: less than others wait for this launcher


@dataclass(frozen=True)
class SupervisorTimings:
    """Timings of a launcher that watches and ends the workers of its host."""

    look: float = 0.25  # at most between two looks at everything
    culprit: float = 0.4  # for the cause of a failure to show itself, after its first sign
    echo: float = 1.0  # the same, when the first sign says itself that another worker is to blame
    last_words: float = 1.0  # for the culprit to end by itself
    left: float = 1.0  # that others may go on after a joined worker left without a word
    verdict: float = 4.0  # for the other hosts to agree on the cause
    kill: float = 2.5  # until SIGKILL after a failure; SIGTERM is sent at once
    asked_term: float = 3.0  # until SIGTERM after Ctrl-C or SIGTERM; SIGINT is sent at once
    asked_kill: float = 6.0  # until SIGKILL then
    # that a process which escaped from its worker's process group may hold output open
    drain: float = 0.5
    # that a screen which takes nothing is waited for, once the job was asked to end
    flush: float = 2.0
    litter: float = 1.0  # between two looks at the temporary folders of workers' children
    # that a death is seen after it happened, while a record carries its own time
    slack: float = 0.2


@dataclass(frozen=True)
class ReplacementTimings:
    """Timings of a launcher that starts workers in place of the dead."""

    backoff: float = 1.0  # before a worker is started again; twice as long each time that it dies
    longest_backoff: float = 60.0  # at most before that
    # a worker that has trained for so long is started again as if it had never died
    steady: float = 10.0
    stopped: float = 2.0  # that a worker may be stopped (SIGSTOP)
    look: float = 0.25  # between two looks for stopped workers
    leave: float = 5.0  # for a worker that has failed to end
    part: float = 5.0  # for the others to decide that they do without a host that leaves


@dataclass(frozen=True)
class JanitorTimings:
    """Timings of the process that removes what a killed job leaves."""

    look: float = 0.5  # between two looks at the children of the workers
    # the same, while one of them may be about to make its temporary folder
    close_look: float = 0.05
    young: float = 5.0  # that a process may be about to do so
    ending: float = 1.5  # for a killed process to end
    unlinking: float = 0.05  # for a living process to unlink what it has in hand


@dataclass(frozen=True)
class HangTimings:
    """Timings of the search for a worker that others wait for."""

    look: float = 0.25  # between two looks of a worker at its own wait
    least: float = 5.0  # a shorter wait is not reported, whatever is usual
    margin: float = 4.0  # before the deadline, a wait counts as given up
    answer: float = 1.0  # for a worker to say where it is
    stack_dump: float = 0.5  # for a worker to write its stack


@dataclass(frozen=True)
class StoreTimings:
    """Timings of workers that meet in the store."""

    # between the first two tries to connect, and twice as long each time
    shortest_retry: float = 0.02
    longest_retry: float = 0.5  # at most between two tries
    connect: float = 2.0  # at most for one try
    heard: float = 2.0  # for others to read why nothing comes of the meeting
    # for the store of an earlier start in this process to end, before a worker looks for the next
    # one
    ending: float = 0.5


@dataclass(frozen=True)
class RecoveryTimings:
    """Timings of workers that go on without the lost, or with newcomers."""

    # for a launcher to announce a new view, before it is told that the group has broken
    view: float = 5.0
    # between two looks for a newer view, of a worker that waits for others to come
    look: float = 0.5
    join_look: float = 0.02  # between two looks of a newcomer whether it is let in
    meet_look: float = 0.002  # between two looks whether all workers of a view have come
    # to connect to the store of a view: its server lives, or there is a newer view soon
    connect: float = 4.0
    # for a newcomer to show of which model it is, while those who train wait for it
    form: float = 5.0
    copy: float = 5.0  # for a copy of what one worker alone has to arrive, when it is waited for


@dataclass(frozen=True)
class ServerTimings:
    """Timings between workers and servers."""

    look: float = 0.1  # between two looks of a server whether it is to end
    # between two looks of a worker whether its wait was ended from elsewhere
    wait_look: float = 0.02
    key: float = 10.0  # for a connection to show its key
    # a server of which nothing comes for so long is lost, though it was asked four times meanwhile
    silence: float = 4.0
    # for a busy server to say that it lives; one whose connection breaks is known sooner
    alive: float = 10.0
    fill: float = 1.0  # between two meetings of the workers while the copy of a server is filled
    last_pull: float = 1.0  # for what is on its way to arrive, at the end of a run that fails


@dataclass(frozen=True)
class ProbeTimings:
    """Timings of workers that measure their cluster: each waits longer than those whom it waits
    for, so that the missing one is named.
    """

    answer: float = 30.0  # for the other end of a link that is measured
    ready: float = 120.0  # of the first worker, for the others to have measured
    word: float = 150.0  # for the first worker to say that all have


@dataclass(frozen=True)
class CallTimings:
    """Timings of a process that has workers carry out a call."""

    # at most between two looks whether it was interrupted: another of its threads may have been
    # given the signal
    look: float = 0.25
    # for their launcher to end them and itself, once it is asked to; then it is killed, and its
    # janitor ends them
    end: float = 15.0


@dataclass(frozen=True)
class TrackerTimings:
    """Timings of the first worker that reports a run to trackers."""

    # at the end, for trackers to take in the rest of the run, before it is said that they are
    # waited for
    quiet: float = 3.0
    close: float = 120.0  # at most for that
    leave: float = 1.0  # the same after an error: others wait for this worker to end


@dataclass(frozen=True)
class Timings:
    """How long the parts of a job wait for each other, in seconds."""

    channel: ChannelTimings = field(default_factory=ChannelTimings)
    rendezvous: RendezvousTimings = field(default_factory=RendezvousTimings)
    membership: MembershipTimings = field(default_factory=MembershipTimings)
    supervisor: SupervisorTimings = field(default_factory=SupervisorTimings)
    replacement: ReplacementTimings = field(default_factory=ReplacementTimings)
    janitor: JanitorTimings = field(default_factory=JanitorTimings)
    hangs: HangTimings = field(default_factory=HangTimings)
    store: StoreTimings = field(default_factory=StoreTimings)
    recovery: RecoveryTimings = field(default_factory=RecoveryTimings)
    servers: ServerTimings = field(default_factory=ServerTimings)
    probe: ProbeTimings = field(default_factory=ProbeTimings)
    call: CallTimings = field(default_factory=CallTimings)
    trackers: TrackerTimings = field(default_factory=TrackerTimings)


DEFAULTS = Timings()


def parse(text: str) -> Timings:
    """Read the timings that differ from the defaults, as JSON by group and field.

    Raises `ValueError` for anything else.
    """
    given = json.loads(text)
    groups = {each.name: getattr(DEFAULTS, each.name) for each in fields(Timings)}
    return replace(
        DEFAULTS,
        **{
            name: _group(name, groups.get(name), found)
            for name, found in _map(given, "timings").items()
        },
    )


def _group(name: str, group: Any, given: Any) -> Any:
    if group is None:
        raise ValueError(f"there are no timings of {name}")
    known = [each.name for each in fields(group)]
    for key, value in _map(given, name).items():
        if key not in known:
            raise ValueError(f"there is no timing {name}.{key}")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}.{key} is {value!r}, and has to be seconds, 0 or more")
    return replace(group, **given)


def _map(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, and has to be a JSON object")
    return value
