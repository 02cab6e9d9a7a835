"""Timings: how long the parts of a job wait for each other, in seconds, as one frozen value.

    launcher, worker, server   discover.read_timings() --> Timings --> constructors of waiting parts

The entry point of each process reads them once and passes them down. Users don't set them: the
waits that users set (`deadline`, `patience`, `late_after`) are arguments of their own. Tests may
run jobs with shorter timings: PACELINE_TIMINGS then holds those that differ from the defaults, as
JSON such as {"membership": {"silence": 0.5}}, for all processes of a job.
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
    # at most, for the last messages of a job to be acknowledged: a network may have been down for
    # seconds before
    linger: float = 8.0
    look: float = 0.25  # between two checks of a launcher that waits for others to call


@dataclass(frozen=True)
class RendezvousTimings:
    """Timings of launchers that meet, and of a job of fixed size after that."""

    # between the first two tries to reach the meeting point, and twice as long each time
    shortest_retry: float = 0.05
    longest_retry: float = 0.5  # at most between two tries
    connect: float = 3.0  # at most for one try
    # longer than the listening host waits: that host gives up first, and says why
    verdict: float = 2.0
    reminder: float = 1.0  # until a launcher prints which hosts it waits for
    next_reminder: float = 10.0  # until it prints them again
    # for a running job to find a newcomer that waits at its meeting point
    invitation: float = 4.0
    beat: float = 1.0  # between two heartbeats
    silence: float = 15.0  # without a message, until a launcher counts as gone
    culprit: float = 0.5  # after the first failure, for an earlier one to arrive from another host
    # the same, if the first failure itself names another worker as the cause
    echo: float = 1.5


@dataclass(frozen=True)
class MembershipTimings:
    """Timings of launchers that decide which hosts take part in a job that survives losses."""

    beat: float = 0.5  # between two heartbeats
    silence: float = 2.5  # without a message, until a launcher counts as lost
    call: float = 5.0  # for a host that is new in the view to call
    repeat: float = 0.2  # until an unanswered message is sent again
    # until a ballot without progress is followed by a higher one, which gets twice as long
    ballot: float = 0.3
    longest_ballot: float = 5.0  # at most for a ballot
    # between two visits to the meeting point: to listen there, or to find a host that waits
    visit: float = 1.0
    visited: float = 1.0  # for the answer there: shorter than other hosts wait for this launcher


@dataclass(frozen=True)
class SupervisorTimings:
    """Timings of a launcher that watches and ends the workers of its host."""

    look: float = 0.25  # at most, between two checks of all workers
    culprit: float = 0.4  # for the cause of a failure to appear, after its first sign
    echo: float = 1.0  # the same, if the first sign itself names another worker as the cause
    last_words: float = 1.0  # for the worker at fault to end by itself
    left: float = 1.0  # for which others may go on after a joined worker left without a message
    verdict: float = 4.0  # for the other hosts to agree on the cause
    kill: float = 2.5  # until SIGKILL after a failure; SIGTERM is sent at once
    asked_term: float = 3.0  # until SIGTERM after Ctrl-C or SIGTERM; SIGINT is sent at once
    asked_kill: float = 6.0  # until SIGKILL then
    # for which a process that left its worker's process group may hold output open
    drain: float = 0.5
    # for a screen that accepts no output, once the job was asked to end
    flush: float = 2.0
    litter: float = 1.0  # between two checks of the temporary folders of workers' children
    # from a death until it is noticed, while a record carries its own time
    slack: float = 0.2


@dataclass(frozen=True)
class ReplacementTimings:
    """Timings of a launcher that replaces workers that have died."""

    backoff: float = 1.0  # before a worker is started again; twice as long each time that it dies
    longest_backoff: float = 60.0  # at most before that
    # of training, after which a worker is started again as if it had never died
    steady: float = 10.0
    stopped: float = 2.0  # at most, for which a worker may be stopped (SIGSTOP)
    look: float = 0.25  # between two checks for stopped workers
    leave: float = 5.0  # for a failed worker to end
    part: float = 5.0  # for other hosts to decide that they go on without a host that leaves


@dataclass(frozen=True)
class JanitorTimings:
    """Timings of the process that cleans up after a killed job."""

    look: float = 0.5  # between two checks of the children of the workers
    # the same, while one of them may be about to make its temporary folder
    close_look: float = 0.05
    young: float = 5.0  # of a process's life, in which it may be about to make that folder
    ending: float = 1.5  # for a killed process to end
    unlinking: float = 0.05  # for a process that is alive to unlink the files that it holds


@dataclass(frozen=True)
class HangTimings:
    """Timings of the search for a worker that others wait for."""

    look: float = 0.25  # between two checks of a worker's own wait
    least: float = 5.0  # the shortest wait that is reported, however short waits usually are
    margin: float = 4.0  # before the deadline: from then on, a wait counts as given up
    answer: float = 1.0  # for a worker to report its position
    stack_dump: float = 0.5  # for a worker to write its stack


@dataclass(frozen=True)
class StoreTimings:
    """Timings of workers that meet in the store."""

    # between the first two tries to connect, and twice as long each time
    shortest_retry: float = 0.02
    longest_retry: float = 0.5  # at most between two tries
    connect: float = 2.0  # at most for one try
    heard: float = 2.0  # for other workers to read why the meeting has failed
    # for the store of an earlier start in this process to end, before a worker looks for the next
    # one
    ending: float = 0.5


@dataclass(frozen=True)
class RecoveryTimings:
    """Timings of workers that go on without lost workers, or with newcomers."""

    # for a launcher to announce a new view, before a worker reports a broken group to it
    view: float = 5.0
    # between two checks for a newer view, by a worker that waits for other workers
    look: float = 0.5
    join_look: float = 0.02  # between two checks of a newcomer whether it has been admitted
    meet_look: float = 0.002  # between two checks whether all workers of a view have come
    # to connect to the store of a view: either its server is alive, or a newer view comes soon
    connect: float = 4.0
    # for a newcomer to show the layout of its model, while workers that train wait for it
    form: float = 5.0
    copy: float = 5.0  # for the copy of state that only one worker has to arrive


@dataclass(frozen=True)
class ServerTimings:
    """Timings between workers and servers."""

    look: float = 0.1  # between two checks of a server whether it should end
    # between two checks of a worker whether another thread has ended its wait
    wait_look: float = 0.02
    key: float = 10.0  # for a connection to show its key
    # without a message, until a server counts as lost; it is asked four times meanwhile
    silence: float = 4.0
    # for a busy server to answer that it is alive; a broken connection is noticed sooner
    alive: float = 10.0
    fill: float = 1.0  # between two meetings of the workers while the copy of a server is filled
    last_pull: float = 1.0  # for messages under way to arrive, at the end of a run that fails


@dataclass(frozen=True)
class ProbeTimings:
    """Timings of workers that measure their cluster.

    Each wait is longer than the waits that it depends on, so that the error names the worker that
    is missing.
    """

    answer: float = 30.0  # for the other end of a link that is measured
    ready: float = 120.0  # for the first worker, until all others have measured
    word: float = 150.0  # for the other workers, until the first one says that all have


@dataclass(frozen=True)
class CallTimings:
    """Timings of a process that has workers carry out a call."""

    # at most, between two checks for an interrupt: the signal may have gone to another thread
    look: float = 0.25
    # for the launcher to end its workers and itself, once asked; then it is killed, and its
    # janitor ends the workers
    end: float = 15.0


@dataclass(frozen=True)
class SavingTimings:
    """Timings of a run that saves a checkpoint as it is asked to end."""

    grace: float = 30.0  # for the checkpoint, if the user gives no time for it
    start: float = 60.0  # for the workers of Ray to answer when their group starts
    look: float = 0.05  # between two checks whether a worker of Ray has ended
    margin: float = 5.0  # for the workers of Ray to answer after the checkpoint


@dataclass(frozen=True)
class TrackerTimings:
    """Timings of the first worker that reports a run to trackers."""

    # at the end, for trackers to receive the rest of the run, before the wait is announced
    quiet: float = 3.0
    close: float = 120.0  # at most, for the same
    leave: float = 1.0  # the same after an error: other workers wait for this one to end


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
    saving: SavingTimings = field(default_factory=SavingTimings)
    trackers: TrackerTimings = field(default_factory=TrackerTimings)


DEFAULT_TIMINGS = Timings()


def parse_timings(text: str) -> Timings:
    """Parse the timings that differ from the defaults: JSON objects by group and field.

    Raises `ValueError` for anything else.
    """
    given = json.loads(text)
    groups = {each.name: getattr(DEFAULT_TIMINGS, each.name) for each in fields(Timings)}
    return replace(
        DEFAULT_TIMINGS,
        **{
            name: _replace_fields(name, groups.get(name), values)
            for name, values in _require_object(given, "timings").items()
        },
    )


def _replace_fields(name: str, group: Any, given: Any) -> Any:
    """Replace fields of one group of timings, after a check of their names and values."""
    if group is None:
        raise ValueError(f"there are no timings of {name}")
    field_names = [each.name for each in fields(group)]
    for key, value in _require_object(given, name).items():
        if key not in field_names:
            raise ValueError(f"there is no timing {name}.{key}")
        # The type itself is compared: a bool is an int, and no number of seconds.
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name}.{key} is {value!r}, and has to be seconds, 0 or more")
    return replace(group, **given)


def _require_object(value: Any, name: str) -> dict[str, Any]:
    """Raise `ValueError` if a value isn't a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, and has to be a JSON object")
    return value
