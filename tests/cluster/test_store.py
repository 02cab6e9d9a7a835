"""Workers meet in a store: signed values, named absentees, and the same view of who shares a
machine.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster import network
from paceline.cluster import store as stores
from paceline.cluster.discover import Place
from paceline.cluster.store_client import ServerEndWaiter
from paceline.errors import DeadlineExceeded, Mismatch, PlaceError, SecretError, WorkerLost
from paceline.timings import StoreTimings, Timings
from tests.harness.jobs import wait_for

SECRET = b"0123456789abcdef"


def free_port() -> int:
    with network.open_listener("127.0.0.1") as probe:
        return int(probe.getsockname()[1])


def places(size: int, **changes: Any) -> list[Place]:
    port = free_port()
    return [
        Place(
            rank=r,
            size=size,
            local_rank=r,
            local_size=size,
            launcher="torchrun",
            meeting=("127.0.0.1", port),
            **changes,
        )
        for r in range(size)
    ]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads stand for processes here: each gets a number of its own."""
    monkeypatch.setattr(stores.os, "getpid", threading.get_ident)
    yield


def together(body: Callable[[Place], Any], workers: list[Place]) -> list[Future[Any]]:
    with ThreadPoolExecutor(len(workers)) as pool:
        return [pool.submit(body, place) for place in workers]


def test_values_pass_and_keys_have_prefixes(claims):
    done = threading.Barrier(3)

    def body(place: Place) -> Any:
        store = stores.connect_store(place, deadline=60)
        store.open_substore("a").put(str(place.rank), {"rank": place.rank, "x": [1.5, None, "é"]})
        values = [store.open_substore("a").take(str(rank)) for rank in range(place.size)]
        done.wait(60)  # rank 0 serves the store: it leaves with the last
        return values

    for future in together(body, places(3, secret=SECRET)):
        assert future.result() == [{"rank": rank, "x": [1.5, None, "é"]} for rank in range(3)]


def test_a_store_that_is_gone_is_named(claims):
    def body(place: Place) -> Any:
        store = stores.connect_store(place, deadline=60)
        if place.rank == 0:
            store.take("there")
            return store.close()
        store.put("there", 1)
        return store.take("never")

    zero, one = together(body, places(2))
    assert zero.exception() is None
    assert isinstance(one.exception(), WorkerLost) and one.exception().ranks == (0,)


def test_torch_store_is_usable_beneath():
    store = stores.make_local_store()
    store.torch.set("k", "v")
    assert store.torch.get("k") == b"v"
    assert not store.open_substore("other").torch.check(["k"])


def test_a_forged_a_moved_and_an_unsigned_value_are_refused():
    signed = stores.make_local_store(SECRET)
    signed.put("a", 1)
    signed.torch.set("b", signed.torch.get("a"))
    with pytest.raises(SecretError, match="another secret"):
        signed.take("b")
    signed.torch.set("c", "0{}")
    with pytest.raises(SecretError, match="isn't signed"):
        signed.take("c")
    plain = stores.make_local_store()
    plain.torch.set("a", signed.torch.get("a"))
    with pytest.raises(SecretError, match="has no secret"):
        plain.take("a")


def test_the_first_word_stays_for_all(claims):
    done = threading.Barrier(4)

    def body(place: Place) -> Any:
        store = stores.connect_store(place, deadline=60)
        found = [store.set_if_absent(f"word{turn}", place.rank) for turn in range(50)]
        assert found == [store.take(f"word{turn}") for turn in range(50)]
        done.wait(60)
        return found

    for secret in (SECRET, None):
        found = [future.result() for future in together(body, places(4, secret=secret))]
        assert all(words == found[0] for words in found)


def test_a_first_word_that_somebody_else_signed_is_refused():
    signed = stores.make_local_store(SECRET)
    signed.torch.set("word", '0"go"')
    with pytest.raises(SecretError, match="isn't signed"):
        signed.set_if_absent("word", "void")


def test_a_wait_ends_at_its_deadline():
    with pytest.raises(DeadlineExceeded, match=r"paceline/x/k .* 0\.2 s"):
        stores.make_local_store().open_substore("x").take("k", 0.2)


def test_nobody_serves():
    place = places(2)[1]
    with pytest.raises(
        DeadlineExceeded, match=f"rank 1 on .* found no store at 127.0.0.1:{place.meeting[1]}"
    ) as caught:
        stores.connect_store(place, deadline=0.5)
    assert caught.value.missing == (0,)


def test_a_name_that_means_nothing():
    with pytest.raises(DeadlineExceeded, match="can't be resolved"):
        stores.connect_store(
            Place(rank=1, size=2, meeting=("no.such.host.invalid", 1)), deadline=0.3
        )


def test_port_in_use_by_another_program():
    with network.open_listener("127.0.0.1") as other:
        place = replace(places(2)[0], meeting=("127.0.0.1", other.getsockname()[1]))
        with pytest.raises(PlaceError, match="in use by another program"):
            stores.connect_store(place, deadline=2)


def test_rank_0_must_be_at_the_meeting_point():
    with pytest.raises(PlaceError, match="isn't an address of it"):
        stores.connect_store(Place(size=2, meeting=("198.51.100.7", 29500)), deadline=2)


def test_the_inherited_socket_is_served():
    listening = network.open_listener("127.0.0.1")
    zero = Place(
        size=2,
        meeting=("127.0.0.1", listening.getsockname()[1]),
        store_fd=listening.fileno(),
        launcher="paceline",
    )
    store = stores.connect_store(zero, deadline=60)
    store.put("a", 1)
    assert store.take("a") == 1
    store.close()
    listening.close()


def test_two_processes_with_one_rank(claims):
    refused = threading.Event()

    def body(place: Place) -> Any:
        try:
            store = stores.connect_store(place, deadline=60)
        except PlaceError:
            refused.set()
            raise
        assert refused.wait(60)
        return store

    first, second = places(2)
    zero, *others = together(body, [first, second, second])
    assert zero.exception() is None
    failures = [future.exception() for future in others if future.exception()]
    assert (
        len(failures) == 1
        and isinstance(failures[0], PlaceError)
        and "is already rank 1" in str(failures[0])
    )


def test_who_starts_again_looks_for_no_store_while_the_last_one_ends(claims, monkeypatch):
    first, second = places(2)
    second = replace(
        second, timings=replace(Timings(), store=replace(StoreTimings(), ending=3600.0))
    )
    zero, one = (future.result() for future in together(stores.connect_store, [first, second]))
    awaited, ended, order = threading.Event(), threading.Event(), []
    wait, join = ServerEndWaiter.wait, stores._connect_until

    def waits(self: ServerEndWaiter, seconds: float) -> None:
        awaited.set()
        wait(self, seconds)

    def joins(*asked: Any) -> Any:
        order.append(ended.is_set())
        return join(*asked)

    monkeypatch.setattr(ServerEndWaiter, "wait", waits)
    monkeypatch.setattr(stores, "_connect_until", joins)
    one.close()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(stores.connect_store, second)
        assert awaited.wait(60)
        ended.set()
        zero.close()
        del zero  # and with it the server
        served = stores.connect_store(first)
        again.result()
        served.close()
    assert all(order)


class TestHosts:
    def meet(
        self,
        workers: list[Place],
        patience: float = 60.0,
        measured: Callable[[Place], str] = lambda place: "",
    ) -> list[Future[Any]]:
        """What each worker makes of those that it meets.

        The first waits `patience` seconds for others, once these have all come.
        """
        here, done = threading.Barrier(len(workers)), threading.Barrier(len(workers))

        def body(place: Place) -> Any:
            store = stores.connect_store(place, deadline=60)
            here.wait(60)
            if place.rank == 0:
                wait_for(
                    lambda: store.open_substore("hosts").has_keys(
                        [str(other.rank) for other in workers if other.rank]
                    )
                )
                store._deadline = patience
            try:
                return stores.discover_hosts(store, place, measured(place))
            finally:
                done.wait(60)

        return together(body, workers)

    def test_one_machine_is_one_host(self, claims):
        for future in self.meet(places(3, secret=SECRET)):
            cluster = future.result()
            assert cluster.host_by_rank() == (0, 0, 0) and cluster.hosts[0].ranks == (0, 1, 2)
            assert cluster.host_of(2).address == "127.0.0.1" and cluster.size == 3

    def test_round_robin_over_two_hosts(self, claims):
        dealt = [
            replace(place, host_rank=place.rank % 2, hosts=2, one_machine=True)
            for place in places(4)
        ]
        for future in self.meet(dealt):
            assert future.result().host_by_rank() == (0, 1, 0, 1)
            assert len(set(future.result().host_names())) == 2

    def test_different_machines(self, claims, monkeypatch):
        """Ranks 0 and 1 share a machine, 2 is on another; no launcher says so."""
        monkeypatch.setattr(stores, "find_own_address", lambda place: f"10.0.0.{place.rank // 2}")
        original = stores.Store.put

        def put(self: stores.Store, key: str, value: Any) -> None:
            if isinstance(value, dict) and "machine" in value and key == "2":
                value["machine"] = "elsewhere"
            original(self, key, value)

        monkeypatch.setattr(stores.Store, "put", put)
        for future in self.meet([replace(place, host_rank=None) for place in places(3)]):
            assert future.result().host_by_rank() == (0, 0, 1)

    def test_a_missing_rank_is_named_on_all(self, claims):
        zero, one, _, three = places(4)
        for future in self.meet([zero, one, three], patience=2.0):
            error = future.exception()
            assert isinstance(error, DeadlineExceeded) and "rank 2 of 4 never came" in str(error)

    def test_another_secret_is_named(self, claims):
        workers = places(3, secret=SECRET)
        workers[1] = replace(workers[1], secret=b"another secret 16")
        for future in self.meet(workers):
            assert isinstance(future.exception(), SecretError)

    @pytest.mark.parametrize("secret", [SECRET, None, b"another secret 16"])
    def test_the_reason_stays_until_all_who_came_have_read_it(self, claims, monkeypatch, secret):
        """Where rank 0 serves the store, the store ends with it: the others would only read that
        it has gone.
        """
        original, read = stores.Store.take, []

        def take(self: stores.Store, key: str, timeout: float | None = None) -> Any:
            if key == "table" and threading.current_thread() in late:
                time.sleep(0.3)
                read.append(time.monotonic())
            return original(self, key, timeout)

        late: list[threading.Thread] = []
        here = threading.Barrier(2)
        monkeypatch.setattr(stores.Store, "take", take)

        def body(place: Place) -> float:
            if place.rank == 1:
                late.append(threading.current_thread())
            store = stores.connect_store(place, deadline=60)
            here.wait(60)
            if place.rank == 0:
                wait_for(lambda: store.open_substore("hosts").has_keys(["1"]))
                store._deadline = 2.0
            with pytest.raises((SecretError, DeadlineExceeded)):
                stores.discover_hosts(store, place)
            return time.monotonic()

        zero, one, _ = places(3, secret=SECRET)
        ended = together(body, [zero, replace(one, secret=secret)])
        assert ended[0].result() > read[0]
        ended[1].result()

    def test_hosts_with_different_measured_clusters_are_named_on_all(self, claims):
        dealt = [
            replace(
                place,
                host_rank=place.rank // 2,
                hosts=2,
                one_machine=True,
                hostname=f"h{place.rank // 2}",
            )
            for place in places(4)
        ]
        for future in self.meet(dealt, measured=lambda place: ("a" * 64, "")[place.rank // 2]):
            error = future.exception()
            assert (
                isinstance(error, Mismatch)
                and "h0: aaaaaaaaaaaa; h1: none" in str(error)
                and "--cluster" in str(error)
            )
        for future in self.meet(dealt, measured=lambda place: "a" * 64):
            assert future.result().host_by_rank() == (0, 0, 1, 1)

    def test_different_sizes(self, claims):
        zero, one = places(2)
        for future in self.meet([zero, replace(one, size=3)]):
            assert isinstance(future.exception(), Mismatch) and "disagree on their number" in str(
                future.exception()
            )


class TestAddress:
    def test_alone_and_one_host(self):
        assert stores.find_own_address(Place()) == "127.0.0.1"
        assert stores.find_own_address(Place(size=2, meeting=("localhost", 1))) == "127.0.0.1"

    def test_loopback_for_several_hosts_says_what_to_set(self):
        spread = Place(size=2, hosts=2, meeting=("127.0.0.1", 1))
        with pytest.raises(PlaceError, match="set PACELINE_INTERFACE"):
            stores.find_own_address(spread)
        assert stores.find_own_address(replace(spread, one_machine=True)) == "127.0.0.1"
        assert stores.find_own_address(replace(spread, interface="127.0.0.1")) == "127.0.0.1"
        if network.list_interfaces():
            assert stores.find_own_address(replace(spread, interface="lo")) == "127.0.0.1"

    def test_unknown_interface(self):
        for name in ("nosuch0", "198.51.100.7"):
            with pytest.raises(PlaceError, match=f"PACELINE_INTERFACE={name}"):
                stores.find_own_address(Place(interface=name))

    def test_the_route_decides(self):
        outer = [
            known for known in network.list_interfaces().values() if not network.is_loopback(known)
        ]
        if not outer:
            pytest.skip("this machine has loopback only")
        assert stores.find_own_address(Place(size=2, hosts=2, meeting=(outer[0], 1))) == outer[0]
        assert network.find_interface_name(outer[0]) in network.list_interfaces()

    def test_store_listens_on_the_chosen_address_only(self, claims):
        outer = [
            known for known in network.list_interfaces().values() if not network.is_loopback(known)
        ]
        if not outer:
            pytest.skip("this machine has loopback only")
        place = places(2)[0]
        store = stores.connect_store(place, deadline=60)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((outer[0], place.meeting[1]), timeout=2)
        store.close()


def test_fingerprint_is_the_same_twice_and_says_nothing():
    assert stores.compute_machine_fingerprint() == stores.compute_machine_fingerprint()
    assert (
        socket.gethostname() not in stores.compute_machine_fingerprint()
        and str(os.getpid()) not in stores.compute_machine_fingerprint()
    )
