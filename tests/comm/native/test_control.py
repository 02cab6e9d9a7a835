from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.cluster import store
from paceline.cluster.store import Store
from paceline.comm.native.control import SMALL, ControlNetwork
from paceline.comm.p2p import connection
from paceline.errors import DeadlineExceeded, PlaceError, SecretError, ViewChanged, WorkerLost
from tests.harness import strangers
from tests.harness.jobs import PATIENCE

Ends = list[ControlNetwork]


def never() -> None: ...


def together(act: Callable[[ControlNetwork], Any], ends: Ends) -> list[Any]:
    """What `act` gives on each end, all at the same time."""
    with ThreadPoolExecutor(len(ends)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(act, end) for end in ends]]


@pytest.fixture
def connected() -> Iterator[Callable[[int], Ends]]:
    """A function that connects so many ends in this process."""
    made: Ends = []

    def make(size: int) -> Ends:
        ends = [ControlNetwork("127.0.0.1", rank, range(10, 10 + size)) for rank in range(size)]
        made.extend(ends)
        meeting = store.make_local_store(b"s" * 32)
        together(
            lambda end: end.connect_ranks(
                meeting, [other.listening for other in ends], PATIENCE, never
            ),
            ends,
        )
        return ends

    yield make
    for end in made:
        end.close()


def tell(end: ControlNetwork, channel: int, number: int, payload: bytes) -> list[bytes]:
    """What all ranks tell in a call: this one `payload`."""
    exchange = end.gather_payloads(channel, number, payload)
    assert exchange.wait_within(PATIENCE)
    return [*exchange.answers[: end.rank], payload, *exchange.answers[end.rank :]]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "length",
    [0, 1, 70_000, 6 << 20],
    ids=["nothing", "a byte", "more than a chunk", "more than the network takes"],
)
def test_all_learn_what_all_tell(connected: Callable[[int], Ends], size: int, length: int) -> None:
    payloads = [
        random.Random(rank).randbytes(length + rank if length else 0) for rank in range(size)
    ]
    ends = connected(size)
    for number in range(2):
        assert (
            together(lambda end, number=number: tell(end, 1, number, payloads[end.rank]), ends)
            == [payloads] * size
        )


def test_a_rank_may_be_ahead_on_one_channel_and_behind_on_another(
    connected: Callable[[int], Ends],
) -> None:
    first, second = connected(2)
    early = [
        first.gather_payloads(1, 0, b"a"),
        first.gather_payloads(1, 1, b"b"),
        first.gather_payloads(2, 0, b"c"),
    ]
    assert not early[0].wait_within(0.01) and not early[0].is_ready()
    assert tell(second, 2, 0, b"C") == [b"c", b"C"]
    assert early[2].wait_within(PATIENCE) and not early[1].is_ready()
    assert (tell(second, 1, 0, b"A"), tell(second, 1, 1, b"B")) == ([b"a", b"A"], [b"b", b"B"])
    assert all(exchange.wait_within(PATIENCE) for exchange in early) and [
        exchange.answers for exchange in early
    ] == [[b"A"], [b"B"], [b"C"]]


def test_messages_of_one_key_keep_their_order(connected: Callable[[int], Ends]) -> None:
    first, second = connected(2)
    for text in (b"1", b"2", b"3"):
        assert first.start_exchange(3, 7, [(1, text)], []).wait_within(PATIENCE)
    places = [bytearray(1) for _ in range(4)]
    takes = [second.start_exchange(3, 7, [], [0], [memoryview(place)]) for place in places]
    assert all(take.wait_within(PATIENCE) for take in takes[:3]) and not takes[3].is_ready()
    first.start_exchange(3, 7, [(1, b"4")], [])
    assert takes[3].wait_within(PATIENCE) and places == [b"1", b"2", b"3", b"4"]
    wrong = second.start_exchange(3, 8, [], [0], [memoryview(bytearray(2))])
    first.start_exchange(3, 8, [(1, b"abc")], [])
    with pytest.raises(
        RuntimeError, match="rank 10 sent 3 bytes, not the 2 that it should have sent"
    ):
        wrong.wait_within(PATIENCE)


def test_what_the_network_does_not_take_is_sent_in_the_background(
    connected: Callable[[int], Ends],
) -> None:
    first, second = connected(2)
    text = random.Random(1).randbytes(24 << 20)
    place = bytearray(len(text))
    waiting = first.start_exchange(1, 0, [], [1])
    with ThreadPoolExecutor(1) as pool:
        heard = pool.submit(waiting.wait_within, 10 * PATIENCE)
        sent = first.start_exchange(3, 0, [(1, text)], [])
        # No thread waits for `sent`.
        assert second.start_exchange(3, 0, [], [0], [memoryview(place)]).wait_within(PATIENCE)
        assert bytes(place) == text and sent.wait_within(PATIENCE) and not heard.done()
        second.start_exchange(1, 0, [(0, b"end")], [])
        assert heard.result()


def test_small_payloads_may_be_written_to_again(connected: Callable[[int], Ends]) -> None:
    first, second = connected(2)
    payloads = [bytearray([number]) * SMALL for number in range(60)]  # more than the network takes
    for payload in payloads:
        first.start_exchange(3, 0, [(1, memoryview(payload))], [])
        payload[:] = b"?" * SMALL
    for number in range(60):
        place = bytearray(SMALL)
        assert second.start_exchange(3, 0, [], [0], [memoryview(place)]).wait_within(PATIENCE)
        assert set(place) == {number}


def test_who_sends_to_one_that_has_gone_learns_of_it(connected: Callable[[int], Ends]) -> None:
    first, second, _ = connected(3)
    lost = first.start_exchange(3, 0, [(1, bytes(24 << 20))], [])
    assert not lost.is_ready()
    second.close()
    with pytest.raises(RuntimeError, match="the connection to rank 11 has ended: "):
        lost.wait_within(PATIENCE)
    with pytest.raises(RuntimeError, match="the connection to rank 11 has ended: "):
        first.start_exchange(3, 0, [(1, b"x")], []).wait_within(PATIENCE)
    assert first.start_exchange(3, 0, [(2, b"x")], []).wait_within(PATIENCE)


def test_threads_wait_at_a_time_and_none_holds_the_other_up(
    connected: Callable[[int], Ends],
) -> None:
    ends, calls, chance = connected(3), 150, random.Random(3)
    naps = {
        (rank, channel): [chance.choice((0.0, 0.0, 0.0, 0.001)) for _ in range(calls)]
        for rank in range(3)
        for channel in range(4)
    }
    heard: list[Any] = []

    def work(end: ControlNetwork, channel: int) -> None:
        for number, nap in enumerate(naps[end.rank, channel]):
            time.sleep(nap)
            answers = tell(end, channel, number, b"%d %d %d" % (end.rank, channel, number))
            if answers != [b"%d %d %d" % (rank, channel, number) for rank in range(3)]:
                heard.append(answers)
        heard.append("done")

    threads = [
        threading.Thread(target=work, args=(end, channel), daemon=True)
        for end in ends
        for channel in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert heard == ["done"] * 12
    assert not any(end._early or end._awaited for end in ends)


def test_what_was_told_before_the_end_still_counts(connected: Callable[[int], Ends]) -> None:
    first, second, third = connected(3)
    second.gather_payloads(1, 0, b"b")
    second.close()
    late = first.gather_payloads(1, 0, b"a")
    third.gather_payloads(1, 0, b"c")
    assert late.wait_within(PATIENCE) and late.answers == [b"b", b"c"]
    lost = first.gather_payloads(1, 1, b"a")
    with pytest.raises(RuntimeError, match="the connection to rank 11 has ended: "):
        while True:
            assert not lost.wait_within(1.0)
    assert lost.is_ready()


def test_a_thread_that_waits_learns_of_the_end_at_once(connected: Callable[[int], Ends]) -> None:
    first, second = connected(2)
    waiting = first.gather_payloads(1, 0, b"a")
    with ThreadPoolExecutor(1) as pool:
        caught = pool.submit(waiting.wait_within, PATIENCE)
        second.mesh.close()
        with pytest.raises(RuntimeError, match="rank 11 has ended: "):
            caught.result(PATIENCE / 2)


class TestConnecting:
    """Who doesn't come, has gone, or is a stranger."""

    @pytest.fixture
    def ends(self, request: pytest.FixtureRequest) -> Iterator[Ends]:
        size = getattr(request, "param", 3)
        ends = [ControlNetwork("127.0.0.1", rank, range(10, 10 + size)) for rank in range(size)]
        yield ends
        for end in ends:
            end.close()

    @staticmethod
    def connect(
        end: ControlNetwork,
        ends: Ends,
        meeting: Store,
        deadline: float = PATIENCE,
        check: Callable[[], None] = never,
    ) -> None:
        end.connect_ranks(meeting, [other.listening for other in ends], deadline, check)

    def test_who_does_not_come_is_named(self, ends: Ends) -> None:
        with pytest.raises(
            DeadlineExceeded, match=r"ranks \[11, 12\] have not connected to rank 10 in 0.2 s"
        ) as caught:
            self.connect(ends[0], ends, store.make_local_store(), 0.2)
        assert caught.value.missing == (11, 12)

    def test_who_has_gone_is_named(self, ends: Ends) -> None:
        ends[0].close()
        with pytest.raises(WorkerLost, match="rank 10 is gone: no process listens") as caught:
            self.connect(ends[1], ends, store.make_local_store())
        assert caught.value.ranks == (10,)

    def test_the_wait_can_be_given_up(self, ends: Ends) -> None:
        def check() -> None:
            raise ViewChanged("another rank has gone")

        with pytest.raises(ViewChanged, match="another rank has gone"):
            self.connect(ends[0], ends, store.make_local_store(), check=check)

    def test_strangers_are_not_let_in(self, ends: Ends) -> None:
        meeting, address = (
            store.make_local_store(b"s" * 32),
            (ends[0].listening.address, ends[0].listening.port),
        )
        for said in (b"", b"x" * 100):
            with socket.create_connection(address) as stranger:
                stranger.sendall(said)
        together(lambda end: self.connect(end, ends, meeting), ends)
        assert (
            together(lambda end: tell(end, 1, 0, b"%d" % end.rank), ends)
            == [[b"0", b"1", b"2"]] * 3
        )

    @pytest.mark.parametrize("held", [8, connection.STRANGERS + 6])
    def test_strangers_that_say_nothing_delay_nobody(
        self, ends: Ends, held: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With patience for a single one of them, a group would never meet if callers took
        turns.
        """
        monkeypatch.setattr(connection, "PROOF", PATIENCE)
        meeting, address = (
            store.make_local_store(b"s" * 32),
            (ends[0].listening.address, ends[0].listening.port),
        )
        with strangers.held_open(address, held) as silent:
            assert len(silent) == held
            together(lambda end: self.connect(end, ends, meeting, PATIENCE / 2), ends)
            assert (
                together(lambda end: tell(end, 1, 0, b"%d" % end.rank), ends)
                == [[b"0", b"1", b"2"]] * 3
            )

    @pytest.mark.parametrize("ends", [2], indirect=True)
    def test_who_does_not_know_the_secret_is_refused_by_both(self, ends: Ends) -> None:
        refused = threading.Event()

        def check() -> None:
            if refused.is_set():
                raise ViewChanged("rank 1 has been refused")

        def connect(end: ControlNetwork) -> str:
            try:
                self.connect(end, ends, store.make_local_store(bytes([end.rank]) * 32), check=check)
            except SecretError:
                refused.set()
                return "refused"
            except ViewChanged:
                return "nobody came"
            return "connected"

        assert together(connect, ends) == ["nobody came", "refused"]

    @pytest.mark.parametrize("ends", [2], indirect=True)
    def test_a_caller_tries_again_while_the_other_does_not_answer(
        self, ends: Ends, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "PROOF", 0.05)
        meeting = store.make_local_store()
        with ThreadPoolExecutor(1) as pool:
            caller = pool.submit(self.connect, ends[1], ends, meeting)
            # by then it has given up at least one connection, which lies in the queue of the
            # listener
            threading.Event().wait(0.3)
            monkeypatch.setattr(connection, "PROOF", PATIENCE)
            self.connect(ends[0], ends, meeting)
            caller.result(PATIENCE)
        assert [*ends[0].links] == [1]


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"can't listen on 192\.0\.2\.1"):
        ControlNetwork("192.0.2.1", 0, range(2))
