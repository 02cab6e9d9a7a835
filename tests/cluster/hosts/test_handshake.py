"""Strangers at the doors of launchers: whatever they send or hold open ends their own
connection, and who has the secret gets in.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import network
from paceline.cluster.hosts.admission import MeetingPoint
from paceline.cluster.hosts.channel import Channel, introduce_launcher, wait_ready
from paceline.cluster.hosts.elastic import ElasticPeers, connect_all_launchers
from paceline.cluster.hosts.handshake import MOST_CALLERS, Handshakes
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.rendezvous import Offer, assemble_hosts
from paceline.errors import SecretError
from paceline.timings import DEFAULT_TIMINGS
from tests.harness import strangers
from tests.harness.handshakes import HELLO, OFFER, SECRET, meeting, offered, senseless, waiting
from tests.harness.jobs import PATIENCE, free_port


class Porter:
    """A lobby at work in a thread; `came` is who was handed on."""

    def __init__(self) -> None:
        self.listening = network.open_listener("127.0.0.1")
        self.listening.setblocking(False)
        self.point = self.listening.getsockname()
        self.said: list[str] = []
        self.lobby = Handshakes(SECRET, self.said.append)
        self.came: list[tuple[Channel, dict[str, Any]]] = []
        self.most = 0
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            for descriptor in wait_ready(
                [self.listening.fileno(), *self.lobby.list_descriptors()], 0.02
            ):
                if descriptor == self.listening.fileno():
                    self.lobby.accept_callers(self.listening)
                elif (came := self.lobby.receive_first_message(descriptor)) is not None:
                    self.came.append(came)
            self.most = max(self.most, len(self.lobby.list_descriptors()))
            self.lobby.drop_late_callers()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.lobby.close()
        self.listening.close()
        for channel, _ in self.came:
            channel.close()

    def newcomer(self, secret: bytes = SECRET) -> Channel:
        """Somebody calls, and says hello; others may push in, so it tries again."""
        while True:
            try:
                found = introduce_launcher(
                    socket.create_connection(self.point, timeout=60), secret, "here", PATIENCE
                )
            except ConnectionError:
                continue
            found.send({"kind": "hello"})
            return found


@pytest.fixture
def porter() -> Iterator[Porter]:
    found = Porter()
    yield found
    found.close()


def arrived(porter: Porter, count: int = 1) -> None:
    strangers.until(lambda: len(porter.came) == count, lambda: time.sleep(0.005))
    assert porter.came[-1][1] == {"kind": "hello"}


class TestLobby:
    @pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.soak)])
    def test_lines_of_strangers(self, porter: Porter, count: int) -> None:
        drawn = random.Random(7)
        for number in range(count):
            strangers.call(porter.point, strangers.line(drawn, [HELLO]), rudely=number % 3 == 0)
        porter.newcomer().close()
        arrived(porter)

    @pytest.mark.parametrize(
        "text",
        [
            '{"paceline": 1, "nonce": "\\ud800", "proof": "00"}',
            "[" * 4000,
            '{"a":' * 700,
            "\0",
            "1e999",
        ],
    )
    def test_a_line_that_once_ended_launchers(self, porter: Porter, text: str) -> None:
        with socket.create_connection(porter.point, timeout=60) as stranger:
            stranger.sendall(text.encode() + b"\n")
            # a greeting, and the end
            strangers.until(lambda: stranger.recv(1 << 12) == b"", lambda: None)
        porter.newcomer().close()
        arrived(porter)

    def test_who_has_the_secret_gets_in_while_strangers_hold_1100_open(
        self, porter: Porter
    ) -> None:
        with strangers.held_open(porter.point, 1100) as held:
            porter.newcomer().close()
            arrived(porter)
            assert len(held) == 1100 and max(connection.fileno() for connection in held) > 1023
        assert porter.most <= MOST_CALLERS + 1

    def test_the_oldest_goes_of_the_address_that_most_are_from(self) -> None:
        lobby, pairs = Handshakes(SECRET), []
        with network.open_listener("0.0.0.0") as listening:
            listening.setblocking(False)
            port = listening.getsockname()[1]
            for number in range(MOST_CALLERS + 2):
                source = "127.0.0.2" if number == 0 else "127.0.0.1"
                pairs.append(
                    socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
                )
                while len(lobby.list_descriptors()) < min(number + 1, MOST_CALLERS) or wait_ready(
                    [listening.fileno()], 0
                ):
                    lobby.accept_callers(listening)
            pairs[0].settimeout(5)
            closed = [number for number, pair in enumerate(pairs) if _hung_up(pair)]
            assert closed == [1, 2]  # and not 0, the oldest of all
        lobby.close()
        for pair in pairs:
            pair.close()

    def test_who_says_nothing_is_hung_up_on(self, porter: Porter) -> None:
        with socket.create_connection(porter.point, timeout=60):
            strangers.until(
                lambda: porter.lobby.list_descriptors() != [], lambda: time.sleep(0.005)
            )
            for caller in [*porter.lobby._callers.values()]:
                caller.deadline = 0.0
            strangers.until(
                lambda: porter.lobby.list_descriptors() == [], lambda: time.sleep(0.005)
            )

    def test_another_secret_is_told_once(self, porter: Porter) -> None:
        for _ in range(3):
            with pytest.raises(SecretError):
                porter.newcomer(b"t" * 32)
        porter.newcomer().close()
        arrived(porter)
        assert len(porter.said) == 1 and "127.0.0.1 came with another secret" in porter.said[0]


def test_nothing_waits_with_select() -> None:
    """It ends a process that has more than 1,023 descriptors open."""
    sources = (Path(__file__).parents[2] / "paceline").rglob("*.py")
    assert [
        path.name
        for path in sources
        if "select.select" in path.read_text() or "from select import" in path.read_text()
    ] == []


def _hung_up(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 12):
            pass
    except BlockingIOError:
        return False
    return True


class TestMeeting:
    def test_strangers_while_it_waits(self) -> None:
        port, drawn = free_port(), random.Random(3)
        with waiting(port) as come:
            for _ in range(500):
                strangers.call(("127.0.0.1", port), strangers.line(drawn, [HELLO, OFFER]))
            come()

    def test_1100_are_held_open(self) -> None:
        port = free_port()
        with waiting(port) as come, strangers.held_open(("127.0.0.1", port), 1100):
            come()

    def test_who_has_the_secret_and_makes_no_sense(self) -> None:
        port, drawn = free_port(), random.Random(5)
        with waiting(port) as come:
            for _ in range(150):
                channel = introduce_launcher(
                    socket.create_connection(("127.0.0.1", port), timeout=60),
                    SECRET,
                    "there",
                    PATIENCE,
                )
                channel.send(senseless(drawn, [OFFER], offered))
                channel.close()
            come()

    def test_another_secret_ends_only_who_came_with_it(self) -> None:
        port = free_port()
        with waiting(port) as come:
            with pytest.raises(SecretError):
                assemble_hosts(meeting("c", port, secret=b"t" * 32))
            come()


def seat(host: int) -> HostSeat:
    return HostSeat(
        host, (10 * host, 10 * host + 1), {"name": f"h{host}", "address": "127.0.0.1", "port": 9}
    )


VIEW = View(1, (seat(0), seat(1), seat(2)), 3)
WISHES = {
    "lost": [1],
    "gone": [2],
    "come": [[7, 0]],
    "joining": {"w": [[], seat(3).facts]},
    "broken": False,
    "left": [],
}
BODIES = [
    {"kind": "decided", "view": {**VIEW.dump(), "number": 2}},
    {
        "kind": "wish",
        "number": 2,
        "wishes": {**WISHES, "lost": [], "gone": [], "come": [], "joining": {}},
    },
    {"kind": "prepare", "number": 2, "ballot": [3, 1]},
    {"kind": "accept", "number": 0, "ballot": [4, 1], "value": VIEW.dump()},
    {"kind": "promise", "number": 2, "ballot": [3, 1], "accepted": [-1, -1], "value": {}},
    {"kind": "accepted", "number": 2, "ballot": [3, 1]},
]
FAILURE = {
    "rank": 1,
    "host": "h",
    "code": 1,
    "words": "failed",
    "is_echo": False,
    "age": 0.5,
    "tail": "",
}
SAID: list[dict[str, Any]] = [
    *({"kind": "membership", "message": body} for body in BODIES),
    *({"kind": kind, "failure": FAILURE} for kind in ("failed", "end")),
    {"kind": "late", "late": [3, "backward", False]},
    {"kind": "stopped", "number": 15, "host": "h"},
    *({"kind": kind} for kind in ("closing", "leaving", "parted", "finished", "beat", "over")),
]


class TestAssembly:
    """A launcher of a job that survives losses, its door, and the members that talk to it."""

    @pytest.fixture
    def launcher(self) -> Iterator[ElasticPeers]:
        listening = network.open_listener("127.0.0.1")
        facts = {"name": "h0", "address": "127.0.0.1", "port": listening.getsockname()[1]}
        found = ElasticPeers(
            0, View(1, (HostSeat(0, (10, 11), facts),), 1), {}, MeetingPoint(listening, SECRET)
        )
        found.run_facts = "[]"
        yield found
        found.close()

    def turn(self, launcher: ElasticPeers) -> None:
        for descriptor in wait_ready(launcher.list_descriptors(), 0.005):
            launcher.read_messages(descriptor)
        launcher.run_timers()

    def port(self, launcher: ElasticPeers) -> int:
        return int(launcher.view.seats[0].facts["port"])

    def newcomer(self, launcher: ElasticPeers) -> Channel:
        with ThreadPoolExecutor(1) as pool:
            point = ("127.0.0.1", self.port(launcher))
            calling = pool.submit(
                lambda: introduce_launcher(
                    socket.create_connection(point, timeout=60), SECRET, "there", PATIENCE
                )
            )
            strangers.until(calling.done, lambda: self.turn(launcher))
            return calling.result()

    def test_strangers_at_the_door(self, launcher: ElasticPeers) -> None:
        drawn = random.Random(11)
        for _ in range(500):
            strangers.call(
                ("127.0.0.1", self.port(launcher)), strangers.line(drawn, [HELLO, OFFER])
            )
            self.turn(launcher)
        self.newcomer(launcher).close()
        assert launcher.verdict is None and launcher.view.hosts == (0,)

    def test_1100_are_held_open(self, launcher: ElasticPeers) -> None:
        point = ("127.0.0.1", self.port(launcher))
        with strangers.many_descriptors(1500), ThreadPoolExecutor(1) as pool:
            held = strangers.held_open(point, 1100)
            strangers.until(
                (opening := pool.submit(held.__enter__)).done, lambda: self.turn(launcher)
            )
            opening.result()
            channel = self.newcomer(launcher)
            channel.send(OFFER)
            strangers.until(lambda: launcher.view.hosts == (0, 1), lambda: self.turn(launcher))
            channel.close()
            held.__exit__(None, None, None)

    def test_who_has_the_secret_and_makes_no_sense(self, launcher: ElasticPeers) -> None:
        drawn = random.Random(13)
        for number in range(150):
            channel = self.newcomer(launcher)
            if number % 2:
                channel.send({"kind": "host", "host": 1})
                channel.send(
                    {"kind": "membership", "message": strangers.bent(drawn, drawn.choice(BODIES))}
                )
            else:
                channel.send(senseless(drawn, [OFFER, {"kind": "host", "host": 0}], offered))
            channel.close()
            self.turn(launcher)
        strangers.until(lambda: launcher.list_descriptors()[1:] == [], lambda: self.turn(launcher))
        assert launcher.verdict is None and launcher.view.find_seat(0) is not None

    @pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.soak)])
    def test_members_that_make_no_sense_are_hung_up_on(self, count: int) -> None:
        """By messages that nobody ever sends; what can be meant is of course done."""
        drawn = random.Random(17)
        now = 0.0
        for number in range(count):
            if number % 20 == 0:  # what could be meant leads elsewhere in time
                launcher = ElasticPeers(0, VIEW, {})
            message = strangers.bent(drawn, drawn.choice(SAID))
            here, there = socket.socketpair()
            with here, there:
                channel = Channel(here, "server")
                launcher._channels[1] = channel
                if isinstance(message, dict):
                    Channel(there, "client").send(message)
                launcher.read_messages(channel.fileno())
                launcher.run_timers()
                launcher.membership.run_timers(now := now + DEFAULT_TIMINGS.membership.repeat)
                launcher._send_outbox()
                launcher.rosters.clear()
                assert (
                    launcher.stop_request is None
                    or launcher.stop_request == (15, "h")
                    or launcher.stop_request[0] in range(1, 65)
                )
                if launcher.verdict is not None:
                    launcher.verdict.summary_line().encode(errors="replace")

    @pytest.mark.parametrize("way", ["decided", "accept", "joining"])
    @pytest.mark.parametrize(
        "wrong", [{"name": None}, {"address": "x"}, {"port": "y"}, {"word": ["z"]}]
    )
    def test_a_view_that_cannot_be_used(self, way: str, wrong: dict[str, Any]) -> None:
        facts = {**seat(3).facts, **wrong}
        view = {**VIEW.dump(), "number": 2, "seats": [*VIEW.dump()["seats"], [3, [30, 31], facts]]}
        said: dict[str, Any] = {
            "decided": {"kind": "decided", "view": view},
            "accept": {"kind": "accept", "number": 2, "ballot": [3, 1], "value": view},
            "joining": {
                "kind": "wish",
                "number": 2,
                "wishes": {**WISHES, "joining": {"w": [[], facts]}},
            },
        }[way]
        launcher = ElasticPeers(0, VIEW, {})
        here, there = socket.socketpair()
        with here, there:
            launcher._channels[1] = Channel(here, "server")
            Channel(there, "client").send({"kind": "membership", "message": said})
            launcher.read_messages(here.fileno())
            assert not launcher._channels and launcher.view == VIEW

    def test_at_the_start(self) -> None:
        sockets = [network.open_listener("127.0.0.1") for _ in range(2)]
        offers = [
            Offer(f"h{n}", 1, "127.0.0.1", "m", 1, 2, "block", (n,), s.getsockname()[1])
            for n, s in enumerate(sockets)
        ]
        drawn = random.Random(19)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(connect_all_launchers, offers, 0, sockets[0], SECRET, 300.0)
            for _ in range(300):
                strangers.call(
                    sockets[0].getsockname(),
                    strangers.line(drawn, [HELLO, {"kind": "host", "host": 1}]),
                )
            for host in (None, "1", 0, 1.0, 2, -1, [1], True):
                channel = introduce_launcher(
                    socket.create_connection(sockets[0].getsockname(), timeout=60),
                    SECRET,
                    "there",
                    PATIENCE,
                )
                channel.send({"kind": "host", "host": host})
                channel.close()
            second = pool.submit(connect_all_launchers, offers, 1, sockets[1], SECRET, 300.0)
            assert [*first.result()] == [1] and [*second.result()] == [0]
        for channel in (*first.result().values(), *second.result().values()):
            channel.close()
        for each in sockets:
            each.close()
