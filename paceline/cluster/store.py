"""The key-value store of all workers: torch's, signed with the job's secret, bound to one
address only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets as random
import socket
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import DistError

from paceline.cluster import network, store_client
from paceline.cluster import secret as secrets
from paceline.cluster.discover import Place
from paceline.cluster.machine import cores, fingerprint
from paceline.cluster.signature import Signer
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import DeadlineExceeded, Mismatch, PlaceError, SecretError, WorkerLost

if TYPE_CHECKING:  # torch's stubs know these names only where they come from
    from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import HashStore, PrefixStore, TCPStore
    from torch.distributed import Store as TorchStore

_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.02  # seconds between two looks at the store
# by meeting point: the server that this process has joined there last
_JOINED: Final[dict[tuple[str, int], store_client.EndOfServer]] = {}


class Store:
    """Keys that all workers see.

    `torch` is the torch.distributed store beneath, under this store's prefix.

    Values put here are JSON; with a secret they are signed together with their key, so that neither
    can be forged or moved. Once it is bound, values of another start of the job (of any job with
    this secret) are refused, too.
    """

    def __init__(
        self,
        store: TorchStore,
        secret: bytes | None = None,
        *,
        path: str = "",
        deadline: float = 30.0,
        start: str = "",
    ) -> None:
        self.torch = PrefixStore(path, store) if path else store
        self._base, self._seal, self._deadline = store, Signer(secret, path, start), deadline

    def bind(self, start: str) -> None:
        """Accept from now on only values of this start of the job.

        On all workers at the same place.
        """
        self._seal = self._seal.bound(start)

    def put(self, key: str, value: Any) -> None:
        """Set `key` to a JSON value."""
        try:
            self.torch.set(key, self._seal.close(key, value))
        except DistError as error:
            raise _gone(error) from error

    def take(self, key: str, timeout: float | None = None) -> Any:
        """Wait for the value of `key`, at most `timeout` seconds (None: the store's deadline).

        Raises `DeadlineExceeded` when it never comes, `SecretError` when it wasn't signed with this
        job's secret, `WorkerLost` when the store is gone. The wait hears signals at once.
        """
        seconds = self._deadline if timeout is None else timeout
        end = time.monotonic() + seconds
        nap = _SHORTEST_NAP
        try:
            while not self.torch.check([key]):
                if time.monotonic() >= end:
                    raise DeadlineExceeded(
                        f"nobody has set {self._seal.path}/{key} in the store within {seconds:g} s"
                    )
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            raw = self.torch.get(key)
        except DistError as error:
            raise _gone(error) from error
        return self._seal.open(key, raw)

    def first(self, key: str, value: Any) -> Any:
        """Set `key` to a JSON value unless it is set; return what it is then.

        Of several workers that do so one wins.

        Errors are those of `take`.
        """
        try:
            return self._seal.open(
                key, self.torch.compare_set(key, "", self._seal.close(key, value))
            )
        except DistError as error:
            raise _gone(error) from error

    def look(self, keys: list[str]) -> list[Any]:
        """Read the values of keys that have all been set; None for one without a valid signature.

        Raises `WorkerLost` without a store.
        """
        try:
            return [
                self._opened(key, raw)
                for key, raw in zip(keys, self.torch.multi_get(keys), strict=True)
            ]
        except DistError as error:
            raise _gone(error) from error

    def _opened(self, key: str, raw: bytes) -> Any:
        try:
            return self._seal.open(key, raw)
        except SecretError:
            return None

    def has(self, keys: list[str]) -> bool:
        """Whether all of these have been set."""
        try:
            return bool(self.torch.check(keys))
        except DistError as error:
            raise _gone(error) from error

    def derive(self, purpose: str) -> bytes:
        """Derive a key for one purpose of this part of the store: all who know the job's secret
        can, and it tells nothing of that.
        """
        return secrets.derive(
            self._seal.secret or b"", "/".join((self._seal.start, self._seal.path, purpose))
        )

    def sub(self, prefix: str) -> Store:
        """Return the part of this store whose keys start with `prefix`."""
        seal = self._seal.sub(prefix)
        return Store(
            self._base, seal.secret, path=seal.path, deadline=self._deadline, start=seal.start
        )

    def close(self) -> None:
        """Close the store; where this process serves it, the server ends with its last user in
        this process.
        """
        del self.torch, self._base


def over(store: TorchStore | Store) -> Store:
    """Make a store of values that all see; a torch store by itself has no secret."""
    return store if isinstance(store, Store) else Store(store)


def memory(secret: bytes | None = None, *, deadline: float = 30.0) -> Store:
    """Make a store inside this process: for one worker alone, and for threads in tests."""
    return Store(HashStore(), secret, path="paceline", deadline=deadline)


def connect(place: Place, *, deadline: float = 30.0) -> Store:
    """Join the store at the meeting point, or serve it there (rank 0, unless its launcher does).

    Raises `PlaceError` where the address can't be bound, `DeadlineExceeded` when nobody serves it
    within `deadline` seconds.
    """
    if place.meeting is None or place.size == 1:
        return memory(place.secret, deadline=deadline)
    if place.rank == 0:
        store = _join(place, deadline) if place.agent_store else _serve(place, deadline)
        try:
            generation = int(_claim(store, place).add("starts/0", 1))
        except DistError as error:
            raise PlaceError(
                f"the store at {place.meeting[0]}:{place.meeting[1]} can't count how often this "
                "job has started: it is gone, or another "
                "program has written there. Set MASTER_PORT to a port of this job's own"
            ) from error
    else:
        store, generation = _follow(place, deadline)
    return Store(
        store, place.secret, path=f"paceline/{place.attempt}/{generation}", deadline=deadline
    )


def address(place: Place) -> str:
    """Return the IP address at which other workers reach this process: the local end of the
    route to the meeting point.
    """
    if place.interface is not None:
        return network.override(place.interface)
    if place.meeting is None:
        return "127.0.0.1"
    chosen = network.route(network.resolve(place.meeting[0])[0])
    if place.hosts > 1 and not place.one_machine and network.loopback(chosen):
        raise PlaceError(
            f"{place.hosts} hosts are to meet at {place.meeting[0]}, which is the loopback of "
            f"{place.hostname} and reaches no other host: "
            "give the meeting point (MASTER_ADDR, --join) as an address that all hosts reach, or "
            f"{network.advice()} (PACELINE_INTERFACE=lo if all of them are this machine)"
        )
    return chosen


def hosts(store: Store, place: Place, measured: str = "") -> Topology:
    """Find out which ranks share a machine: the same answer on every rank. All ranks call it.

    Two ranks are on one host when they can share memory (same boot, same namespaces, same /dev/shm,
    same user) and their launcher counts them as one host. Raises `DeadlineExceeded` naming the
    ranks that never came, and `Mismatch` on all ranks where `measured`, the digest of the measured
    cluster that a rank was given, isn't the same on all of them.

    From then on the store is bound to this start of the job: each rank comes with a number that
    nobody has seen before, all of them are in the table that rank 0 signs, and each sees its own
    there.
    """
    here = store.sub("hosts")
    mine = {
        "name": place.hostname,
        "machine": fingerprint(),
        "group": -1 if place.host_rank is None else place.host_rank,
        "address": address(place),
        "cores": cores(),
        "size": place.size,
        "measured": measured,
        "nonce": random.token_hex(16),
    }
    here.put(str(place.rank), mine)
    if place.rank == 0:
        _publish(here, place)
    try:
        table = here.take("table")
    except SecretError:
        here.put(f"heard/{place.rank}", True)
        raise
    if "error" in table:
        here.put(f"heard/{place.rank}", True)
        raise {"SecretError": SecretError, "DeadlineExceeded": DeadlineExceeded}.get(
            table["kind"], Mismatch
        )(table["error"])
    if table["ranks"][place.rank] != mine:
        raise Mismatch(
            f"rank {place.rank} is known to rank 0 as {table['ranks'][place.rank]}, and is {mine}: "
            "two jobs use one meeting point"
        )
    store.bind(
        hashlib.sha256("".join(entry["nonce"] for entry in table["ranks"]).encode()).hexdigest()
    )
    return _cluster(table["ranks"])


def _publish(here: Store, place: Place) -> None:
    """Collect on rank 0 what all ranks say, and publish one table, or the reason why there is
    none.
    """
    try:
        ranks = _collect(here, place)
    except (SecretError, DeadlineExceeded, Mismatch) as error:
        here.put("table", {"error": str(error), "kind": type(error).__name__})
        _await_readers(here, place)  # the store may end with this process
        raise
    here.put("table", {"ranks": ranks})


def _await_readers(here: Store, place: Place) -> None:
    """Stay until all ranks that have come have read why there is no table."""
    end = time.monotonic() + place.timings.store.heard
    while time.monotonic() < end and any(
        here.has([str(rank)]) and not here.has([f"heard/{rank}"]) for rank in range(1, place.size)
    ):
        time.sleep(_LONGEST_NAP)


def _collect(here: Store, place: Place) -> list[dict[str, Any]]:
    # Rank 0 gives up first, so that the others hear its reason before their own deadline passes.
    end = time.monotonic() + 0.9 * here._deadline
    ranks: list[dict[str, Any]] = []
    for rank in range(place.size):
        try:
            ranks.append(here.take(str(rank), max(0.0, end - time.monotonic())))
        except DeadlineExceeded:
            missing = tuple(r for r in range(rank, place.size) if not here.torch.check([str(r)]))
            names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            raise DeadlineExceeded(
                (
                    f"{names} of {place.size} never came to the meeting at the start within "
                    f"{here._deadline:g} s: look at their output"
                ),
                missing,
            ) from None
        except SecretError as error:
            raise SecretError(f"rank {rank}: {error}") from None
    sizes = {entry["size"] for entry in ranks}
    if len(sizes) > 1:
        raise Mismatch(
            f"workers disagree on how many they are: {sorted(sizes)}. Start all of them with the "
            "same numbers"
        )
    _compare_measured(ranks)
    apart = {(entry["machine"], entry["group"]) for entry in ranks}
    if len({machine for machine, _ in apart}) > 1:
        lost = [
            f"rank {rank} on {entry['name']}"
            for rank, entry in enumerate(ranks)
            if network.loopback(entry["address"])
        ]
        if lost:
            raise Mismatch(
                f"{lost[0]} is on a loopback address that other hosts can't reach: "
                f"{network.advice()}"
            )
    return ranks


def _compare_measured(ranks: list[dict[str, Any]]) -> None:
    """Raise `Mismatch` where hosts were given different measured clusters, or some were given
    none.
    """
    by_digest: dict[str, list[str]] = {}
    for entry in ranks:
        by_digest.setdefault(entry["measured"], []).append(entry["name"])
    if len(by_digest) > 1:
        sides = [
            f"{', '.join(dict.fromkeys(names))}: {digest[:12] or 'none'}"
            for digest, names in by_digest.items()
        ]
        raise Mismatch(
            f"workers were given different measured clusters ({'; '.join(sides)}): "
            "give all hosts --cluster with the same file, a copy of "
            "the one that `paceline probe` has written"
        )


def _cluster(ranks: list[dict[str, Any]]) -> Topology:
    members: dict[tuple[str, int], list[int]] = {}
    for rank, entry in enumerate(ranks):
        members.setdefault((entry["machine"], entry["group"]), []).append(rank)
    names = Counter(ranks[ranks_here[0]]["name"] for ranks_here in members.values())
    machines = []
    for index, ranks_here in enumerate(members.values()):
        first = ranks[ranks_here[0]]
        name = first["name"] if names[first["name"]] == 1 else f"{first['name']}#{index}"
        machines.append(HostRanks(name, tuple(ranks_here), first["address"], first["cores"]))
    return Topology(tuple(machines))


def _serve(place: Place, deadline: float) -> TorchStore:
    assert place.meeting is not None
    host, port = place.meeting
    timeout = timedelta(seconds=deadline)
    if place.store_fd is not None:
        # A copy: the descriptor stays open, so that a later start in this process can serve again.
        # While an earlier one still serves, it is joined (multi_tenant): two servers on one socket
        # would divide the workers between them.
        descriptor = os.dup(place.store_fd)
        return TCPStore(
            host,
            port,
            None,
            True,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
    chosen = _bindable(place)
    try:
        descriptor = network.listen(chosen, port).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PlaceError(
                f"can't listen on {chosen}:{port} ({error.strerror}): "
                "set MASTER_PORT to another port"
            ) from error
        return _shared(chosen, port, timeout)
    return TCPStore(
        chosen,
        port,
        None,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def _shared(chosen: str, port: int, timeout: timedelta) -> TorchStore:
    """Find the store that this process already serves there (init_process_group came first), if
    it does.
    """
    try:
        return TCPStore(
            chosen, port, None, True, timeout, wait_for_workers=False, multi_tenant=True
        )
    except DistError as error:
        raise PlaceError(
            f"port {port} of {chosen} is in use by another program: set MASTER_PORT to a free one, "
            "for every worker"
        ) from error


def _bindable(place: Place) -> str:
    """Return the address of this machine on which rank 0 serves the store."""
    assert place.meeting is not None
    host = place.meeting[0]
    addresses = network.resolve(host)
    mine = [known for known in addresses if network.local(known)]
    if not mine:
        raise PlaceError(
            f"rank 0 runs on {place.hostname}, but the meeting point {host} "
            f"({', '.join(addresses)}) isn't an address of it: "
            "set MASTER_ADDR to one"
        )
    if network.loopback(mine[0]) and place.hosts > 1:
        return address(place)
    return mine[0]


def _join(place: Place, left: float, deadline: float | None = None) -> TCPStore:
    """Try to connect until a server listens: torch's own wait for one can't be interrupted, and
    names nobody.

    `left` seconds are left of `deadline` (None: all of them).
    """
    assert place.meeting is not None
    host, port = place.meeting
    end = time.monotonic() + left
    deadline = left if deadline is None else deadline
    nap = place.timings.store.shortest_retry
    while True:
        outcome = _knock(place, end - time.monotonic(), deadline)
        if isinstance(outcome, TCPStore):
            return outcome
        if time.monotonic() + nap >= end:
            reason = getattr(outcome, "strerror", None) or str(outcome) or type(outcome).__name__
            raise DeadlineExceeded(
                f"rank {place.rank} on {place.hostname} found no store at {host}:{port} within "
                f"{deadline:g} s ({reason}): "
                f"rank 0 hasn't come, or its host can't be reached from here, or {host} means "
                "another address there",
                (0,),
            ) from outcome
        time.sleep(nap)
        nap = min(2 * nap, place.timings.store.longest_retry)


def _knock(place: Place, left: float, deadline: float) -> TCPStore | Exception:
    """Try to connect once: a client of the store, or why there is none yet.

    Names may start to resolve, and servers to listen, after us.

    `left` seconds are left for that; the client waits for an answer for `deadline` seconds.
    """
    assert place.meeting is not None
    host, port = place.meeting
    try:
        target = network.resolve(host)[0]
    except PlaceError as error:
        return error
    if network.loopback(target) and place.hosts > 1:
        # among several hosts, a name that means loopback here means this host
        target = address(place)
    try:
        socket.create_connection(
            (target, port), timeout=max(0.1, min(place.timings.store.connect, left))
        ).close()
        client = store_client.connect(target, port, max(1.0, left))
        store_client.limit(client, deadline)
    except (OSError, DistError) as error:
        return error
    return client


def _follow(place: Place, deadline: float) -> tuple[TCPStore, int]:
    """Find the store to which rank 0 has come once more than this rank, and how often that is.

    Workers that start again in one process meet under new keys; the store of their last start may
    be about to end, so no worker stays in it to wait. Its end is awaited a short while, as torch
    writes pages about a store that ends under a call.
    """
    assert place.meeting is not None
    end = time.monotonic() + deadline
    nap = place.timings.store.shortest_retry
    if (before := _JOINED.pop(place.meeting, None)) is not None:
        before.wait(min(deadline, place.timings.store.ending))
        time.sleep(nap)  # it may take calls a moment longer
    while True:
        store = _join(place, max(0.0, end - time.monotonic()), deadline)
        try:
            claims = _claim(store, place)
            if claims.add("starts/0", 0) > claims.add(f"starts/{place.rank}", 0):
                if not place.agent_store:  # else it doesn't end between two starts
                    _JOINED[place.meeting] = store_client.EndOfServer(store)
                return store, int(claims.add(f"starts/{place.rank}", 1))
        except DistError:
            nap = place.timings.store.shortest_retry  # it has ended now, and the next one is near
        del store
        if time.monotonic() + nap >= end:
            raise DeadlineExceeded(
                f"rank {place.rank} on {place.hostname} found a store at {place.meeting}, but rank "
                f"0 didn't come to it within {deadline:g} s: look at its output",
                (0,),
            )
        time.sleep(nap)
        nap = min(2 * nap, place.timings.store.longest_retry)


def _claim(store: TorchStore, place: Place) -> TorchStore:
    """Return the part of the store where ranks are claimed; raises if another process has
    claimed this one.
    """
    me = f"{fingerprint()}:{os.getpid()}"
    claims = PrefixStore(f"paceline/{place.attempt}/claims", store)
    owner = claims.compare_set(str(place.rank), "", me).decode(errors="replace")
    if owner != me:
        raise PlaceError(
            f"another process already is rank {place.rank} at {place.meeting}: "
            "two jobs share this meeting point, "
            "or two workers got the same RANK. Give each job its own MASTER_PORT"
        )
    return claims


def _gone(error: Exception) -> WorkerLost:
    return WorkerLost(
        (
            "the store at the meeting point is gone, and rank 0 with it "
            f"({str(error).splitlines()[0]})"
        ),
        (0,),
    )
