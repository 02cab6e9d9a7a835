"""Rendezvous: how the launchers of several hosts meet and agree on ranks.

    host A, which owns HOST    listens at HOST:PORT
    host B                     calls it:    offer     ->
    host C                     calls it:    offer     ->
                                            <- begin: the offers of all hosts, and the number of
                                               the host among them

All are given the same HOST:PORT. The first launcher on the machine that owns HOST listens there.
All others call it, also later ones on the same machine. The connections stay open until the job is
over, so when one host ends all others notice, and name it.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from paceline.cluster import network
from paceline.cluster.hosts.channel import (
    MALFORMED,
    Channel,
    ChannelBroken,
    introduce_launcher,
)
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.meeting import Meeting, raise_if_stopped, read_messages, read_points
from paceline.cluster.hosts.meeting_listener import MeetingListener
from paceline.cluster.hosts.membership import View
from paceline.cluster.hosts.peers import Offer, read_stop_message
from paceline.cluster.hosts.restart_messages import JobStopped, Links, RestartState
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, PlaceError, SecretError


@dataclass(frozen=True)
class Admission:
    """The place of a host in a running job: the view that has it, its number, and the run."""

    view: View
    host: int
    run: str


def assemble_hosts(meeting: Meeting) -> FixedPeers | Admission:
    """Meet the other hosts, and agree on ranks.

    Returns:
        The connections to the other launchers, with the offers of all hosts and this host's number.
        If an elastic job already runs there, this host's place in it.

    Raises:
        PlaceError: This host, or one that called, can't take part.
        SecretError: The other side has another secret.
        Mismatch: Hosts were started with different options.
        DeadlineExceeded: Not all hosts came in time.
    """
    end = time.monotonic() + meeting.deadline
    own_address = _find_own_address(meeting)
    if (peers := _attend_by_link(meeting, end)) is not None:
        return peers
    retry_seconds, reminder = meeting.timings.rendezvous.shortest_retry, meeting.make_reminder()
    # Until it succeeds, this host tries in turn to listen at the meeting point and to call it: the
    # host that listens may come later, or may have gone.
    while True:
        listening = None if own_address is None else _listen_at_point(own_address, meeting)
        if listening is not None:
            with listening:
                outcome = MeetingListener(meeting, listening, end).gather_hosts()
                return (
                    outcome if isinstance(outcome, FixedPeers) else seek_admission(outcome, meeting)
                )
        if meeting.links is not None:
            # Another launcher on this machine listens, so all meet there.
            _close_links(meeting.links, meeting.timings.channel.flush)
        channel_or_error = _call_launcher(
            (own_address or network.resolve_host(meeting.point[0])[0], meeting.point[1]),
            meeting,
            end,
        )
        if isinstance(channel_or_error, Channel):
            return _attend_meeting(meeting, channel_or_error, end)
        if time.monotonic() + retry_seconds >= end:
            raise DeadlineExceeded(
                f"the meeting point {meeting.point_text} could not be reached from "
                f"{meeting.offer.name} "
                f"within {meeting.deadline:g} s "
                f"({channel_or_error.strerror or channel_or_error}): "
                "no host that owns this address has started "
                f"`paceline run --join {meeting.point_text}`, or a firewall is between"
            )
        reminder.remind_if_due(partial(_describe_unanswered, meeting, channel_or_error))
        time.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, meeting.timings.rendezvous.longest_retry)


def _attend_by_link(meeting: Meeting, end: float) -> FixedPeers | Admission | None:
    """Take part through the connection that is left from the start before.

    None if there is none, or if the launcher at its other end is gone.
    """
    links = meeting.links
    channel = (
        None
        if links is None or links.host == links.server
        else links.channels.pop(links.server, None)
    )
    if channel is None:
        return None
    try:
        return _attend_meeting(meeting, channel, end)
    except DeadlineExceeded as error:
        if isinstance(error.__cause__, ChannelBroken) and time.monotonic() < end:
            return None  # the other launcher is gone: it didn't just give up
        raise


def _close_links(links: Links, seconds: float) -> None:
    """Close the connections that are left from the start before.

    If one of the other launchers was asked to end the job, tell the rest for at most `seconds`, and
    raise its `JobStopped`.
    """
    try:
        for channel in links.channels.values():
            for message in read_messages(channel) or ():
                raise_if_stopped(message)
    except JobStopped as stop:
        links.stop_job(stop, seconds)
        raise
    links.close()


def _describe_unanswered(meeting: Meeting, error: OSError) -> str:
    """The reminder that the meeting point doesn't answer yet."""
    reason = error.strerror or error
    return (
        f"nobody answers at {meeting.point_text} yet ({reason}); on the host with that address, "
        "run: "
        f"{meeting.command}"
    )


def seek_admission(points: Sequence[tuple[str, int]], meeting: Meeting) -> Admission:
    """Get a place in a running job from any of its launchers, which are called at these points.

    Raises the same errors as `assemble_hosts`.
    """
    end = time.monotonic() + meeting.deadline
    retry_seconds = meeting.timings.rendezvous.shortest_retry
    while time.monotonic() < end:
        for point in points:
            try:
                channel_or_error = _call_launcher(point, meeting, end)
                admission = (
                    _attend_meeting(meeting, channel_or_error, end)
                    if isinstance(channel_or_error, Channel)
                    else None
                )
            except DeadlineExceeded:
                continue  # it hung up: it may have been cut off from the job itself
            if isinstance(admission, Admission):
                return admission
        time.sleep(min(retry_seconds, max(0.0, end - time.monotonic())))
        retry_seconds = min(2 * retry_seconds, meeting.timings.rendezvous.longest_retry)
    where = ", ".join(f"{address}:{port}" for address, port in points)
    raise DeadlineExceeded(
        f"none of the job's launchers ({where}) took {meeting.offer.name} in within "
        f"{meeting.deadline:g} s"
    )


def _find_own_address(meeting: Meeting) -> str | None:
    """The address to listen on, if the meeting point is on this machine; else None."""
    host = meeting.point[0]
    own_addresses = [
        address for address in network.resolve_host(host) if network.is_own_address(address)
    ]
    if not own_addresses:
        return None
    if network.is_loopback(own_addresses[0]) and not network.is_written_as_local(host):
        # A line in /etc/hosts maps the machine's own name to loopback, which other hosts can't
        # reach. So this listens on the address from which this host reaches the others.
        if network.is_loopback(meeting.offer.address):
            raise PlaceError(
                f"on {meeting.offer.name} the name {host} means {own_addresses[0]}, "
                f"which other hosts can't reach: {network.format_interface_advice()}"
            )
        return meeting.offer.address
    return own_addresses[0]


def _listen_at_point(address: str, meeting: Meeting) -> socket.socket | None:
    """Listen at the meeting point, unless another process already does."""
    try:
        return network.open_listener(address, meeting.point[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise PlaceError(
            f"can't listen on {address}:{meeting.point[1]} ({error.strerror}): "
            "choose another port for --join"
        ) from error


def _call_launcher(point: tuple[str, int], meeting: Meeting, end: float) -> Channel | OSError:
    """Call a launcher at this point. Returns the channel, or the error of the network."""
    try:
        connection = socket.create_connection(
            point, timeout=max(0.1, min(meeting.timings.rendezvous.connect, end - time.monotonic()))
        )
        return introduce_launcher(
            connection, meeting.secret, f"{point[0]}:{point[1]}", meeting.timings.channel.hello
        )
    except OSError as error:
        return error


def _attend_meeting(meeting: Meeting, channel: Channel, end: float) -> FixedPeers | Admission:
    """Send this host's offer to the launcher that listens, and wait for its answer."""
    # Hosts may come minutes apart, so the user is reminded of the wait.
    reminder, answer_deadline = meeting.make_reminder(), end + meeting.timings.rendezvous.verdict
    restarts = None if meeting.restarts is None else meeting.restarts.dump()
    terms = {
        "offer": asdict(meeting.offer),
        "hosts": meeting.hosts,
        "host_rank": meeting.host_rank,
        "restarts": restarts,
    }
    try:
        channel.send({"kind": "offer", **terms})
        # This waits longer than the launcher that listens, which gives up first and says why.
        answer = channel.wait_for_message(
            answer_deadline,
            lambda: reminder.remind_if_due(
                lambda: f"has come to {meeting.point_text}, and waits there for the other hosts"
            ),
        )
    except JobStopped as stop:
        channel.send(stop.dump())
        channel.flush(meeting.timings.channel.flush)
        channel.close()
        raise
    except ChannelBroken as error:
        channel.close()
        raise DeadlineExceeded(
            f"the launcher at {meeting.point_text} left before all "
            f"{meeting.hosts} hosts had come ({error})"
        ) from error
    try:
        return _interpret_answer(meeting, channel, answer)
    except MALFORMED as error:
        channel.close()
        if isinstance(error, PacelineError):
            raise
        raise PlaceError(
            f"the launcher at {meeting.point_text} answers with what makes no sense here "
            f"({type(error).__name__}: {error}): install the same version of paceline on all hosts"
        ) from error


def _interpret_answer(
    meeting: Meeting, channel: Channel, answer: dict[str, Any]
) -> FixedPeers | Admission:
    """Interpret the answer to an offer. Raises one of `channel.MALFORMED` if it is malformed."""
    if answer.get("kind") == "refused":
        raise _ERROR_TYPES.get(str(answer.get("error")), PlaceError)(str(answer.get("why")))
    if answer.get("kind") == "stopped":
        raise JobStopped(*read_stop_message(answer))
    if answer.get("kind") == "begin":
        # The table must have this host's own offer at its number, else the answer isn't for it.
        offers = tuple(Offer.load(offer) for offer in answer["table"])
        host_rank, server = answer["host_rank"], answer["server"]
        if {host_rank, server} - {*range(len(offers))} or offers[host_rank] != meeting.offer:
            raise ValueError("this host is not in the table")
        state = None if answer.get("restarts") is None else RestartState.load(answer["restarts"])
        places = (offers, host_rank, {server: channel})
        return FixedPeers(*places, server=server, state=state, timings=meeting.timings)
    channel.close()
    if answer.get("kind") == "invitation":
        return seek_admission(read_points(answer), meeting)
    return Admission(View.load(answer["view"]), int(answer["host"]), str(answer["run"]))


_ERROR_TYPES: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (PlaceError, SecretError, Mismatch, DeadlineExceeded)
}
