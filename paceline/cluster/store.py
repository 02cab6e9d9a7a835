"""The key-value store of all workers: torch's, with values signed with the job's secret.

rank 0        serves at the meeting point --> starts/0 += 1 -----------> hosts/0 --> hosts/table
other ranks   connect ----------------------> wait for starts/0 -------> hosts/r --> read the table

The server listens on one address only. Every start of a job in the same processes has keys of its
own, which begin with `paceline/<attempt>/<number of the start>`.
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
from paceline.cluster.machine import compute_machine_fingerprint, count_cores
from paceline.cluster.signature import Signer
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import DeadlineExceeded, Mismatch, PlaceError, SecretError, WorkerLost

# torch's stubs have these names only in the private module that defines them.
if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
    from torch._C._distributed_c10d import Store as TorchStore
else:
    from torch.distributed import HashStore, PrefixStore, TCPStore
    from torch.distributed import Store as TorchStore

_SHORTEST_NAP, _LONGEST_NAP = 0.0005, 0.02  # seconds between two checks of the store
# Server that this process has joined last at each meeting point.
_LAST_SERVERS: Final[dict[tuple[str, int], store_client.ServerEndWaiter]] = {}


class Store:
    """A key-value store that all workers share.

    Values are JSON. With a secret they are signed together with their key, so that no other program
    can forge them or move them to another key. After `bind_to_start`, values of other starts of any
    job with this secret are refused too.

    Args:
        store: The torch.distributed store beneath. `torch` is the same one with the prefix.
        secret: The job's secret. None: values aren't signed.
        path: Prefix of all keys.
        deadline: Seconds that a wait may take by default.
        start: Id of the start of the job, see `Signer`.
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
        self._base, self._signer, self._deadline = store, Signer(secret, path, start), deadline

    def bind_to_start(self, start: str) -> None:
        """Refuse values of other starts of the job from now on.

        All workers call it at the same point of the program.
        """
        self._signer = self._signer.copy_for_start(start)

    def put(self, key: str, value: Any) -> None:
        """Set `key` to a JSON value."""
        try:
            self.torch.set(key, self._signer.sign_value(key, value))
        except DistError as error:
            raise _make_store_error(error) from error

    def take(self, key: str, timeout: float | None = None) -> Any:
        """Wait for the value of `key`. The value stays in the store.

        Args:
            key: The key.
            timeout: Seconds to wait. Default: the store's deadline.

        Raises:
            DeadlineExceeded: No worker has set the key in time.
            SecretError: The value wasn't signed with this job's secret.
            WorkerLost: The store is gone.
        """
        seconds = self._deadline if timeout is None else timeout
        end = time.monotonic() + seconds
        nap = _SHORTEST_NAP
        try:
            # Polls, as torch's own wait can't be interrupted by a signal.
            while not self.torch.check([key]):
                if time.monotonic() >= end:
                    raise DeadlineExceeded(
                        f"no worker has set {self._signer.path}/{key} in the store "
                        f"within {seconds:g} s"
                    )
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            raw = self.torch.get(key)
        except DistError as error:
            raise _make_store_error(error) from error
        return self._signer.verify_value(key, raw)

    def set_if_absent(self, key: str, value: Any) -> Any:
        """Set `key` to a JSON value unless it is set already. Returns the value that it has then.

        If several workers call it, the value of one of them is set. Raises as `take` does.
        """
        try:
            return self._signer.verify_value(
                key, self.torch.compare_set(key, "", self._signer.sign_value(key, value))
            )
        except DistError as error:
            raise _make_store_error(error) from error

    def read_values(self, keys: list[str]) -> list[Any]:
        """Read the values of keys that are all set. A value is None if its signature is wrong.

        Raises `WorkerLost` if the store is gone.
        """
        try:
            return [
                self._verify_or_none(key, raw)
                for key, raw in zip(keys, self.torch.multi_get(keys), strict=True)
            ]
        except DistError as error:
            raise _make_store_error(error) from error

    def _verify_or_none(self, key: str, raw: bytes) -> Any:
        try:
            return self._signer.verify_value(key, raw)
        except SecretError:
            return None

    def has_keys(self, keys: list[str]) -> bool:
        """Whether all of these keys are set."""
        try:
            return bool(self.torch.check(keys))
        except DistError as error:
            raise _make_store_error(error) from error

    def derive_store_key(self, purpose: str) -> bytes:
        """Derive a cryptographic key for one purpose of this part of the store.

        Every worker with the job's secret derives the same one. It reveals nothing of the secret.
        """
        return secrets.derive_key(
            self._signer.secret or b"", "/".join((self._signer.start, self._signer.path, purpose))
        )

    def open_substore(self, prefix: str) -> Store:
        """Make the part of this store whose keys have one more prefix."""
        seal = self._signer.extend_path(prefix)
        return Store(
            self._base, seal.secret, path=seal.path, deadline=self._deadline, start=seal.start
        )

    def close(self) -> None:
        """Close the store.

        If this process serves it, the server ends when no other object of the process uses it.
        """
        # torch's stores have no `close`: the last reference ends the connection, and the server.
        del self.torch, self._base


def wrap_store(store: TorchStore | Store) -> Store:
    """Wrap a torch store, without a secret. A `Store` is returned as it is."""
    return store if isinstance(store, Store) else Store(store)


def make_local_store(secret: bytes | None = None, *, deadline: float = 30.0) -> Store:
    """Make a store inside this process, for a job of one worker and for tests with threads."""
    return Store(HashStore(), secret, path="paceline", deadline=deadline)


def connect_store(place: Place, *, deadline: float = 30.0) -> Store:
    """Connect to the store at the meeting point. Rank 0 serves it, unless its launcher does.

    Args:
        place: Place of this worker.
        deadline: Seconds to wait for the server, and in later waits.

    Raises:
        PlaceError: The address can't be bound, or another job uses it.
        DeadlineExceeded: No server has come in time.
    """
    if place.meeting is None or place.size == 1:
        return make_local_store(place.secret, deadline=deadline)
    if place.rank == 0:
        store = (
            _connect_until(place, deadline) if place.agent_store else _serve_store(place, deadline)
        )
        try:
            generation = int(_claim_rank(store, place).add("starts/0", 1))
        except DistError as error:
            raise PlaceError(
                f"the store at {place.meeting[0]}:{place.meeting[1]} can't count how often this "
                "job has started: it is gone, or another "
                "program has written there. Set MASTER_PORT to a port of this job's own"
            ) from error
    else:
        store, generation = _follow_first_rank(place, deadline)
    return Store(
        store, place.secret, path=f"paceline/{place.attempt}/{generation}", deadline=deadline
    )


def find_own_address(place: Place) -> str:
    """Find the IP address at which other workers reach this process.

    It is the local end of the route to the meeting point, unless PACELINE_INTERFACE is set.
    """
    if place.interface is not None:
        return network.resolve_interface(place.interface)
    if place.meeting is None:
        return "127.0.0.1"
    chosen = network.find_local_address(network.resolve_host(place.meeting[0])[0])
    if place.hosts > 1 and not place.one_machine and network.is_loopback(chosen):
        raise PlaceError(
            f"{place.hosts} hosts should meet at {place.meeting[0]}, which is the loopback of "
            f"{place.hostname}, so other hosts can't reach it: "
            "give the meeting point (MASTER_ADDR, --join) as an address that all hosts reach, or "
            f"{network.format_interface_advice()} (PACELINE_INTERFACE=lo if all of them are this "
            "machine)"
        )
    return chosen


def discover_hosts(store: Store, place: Place, measured: str = "") -> Topology:
    """Find out which ranks share a machine. All ranks call it, and get the same answer.

    Two ranks are on one host if they can share memory (same boot, namespaces, /dev/shm and user),
    and their launcher counts them as one host.

    The store is bound to this start of the job then. The id of the start is a hash of random
    numbers, one from each rank. All are in the table that rank 0 signs, and each rank checks that
    the table has its own.

    Args:
        store: The store of all workers.
        place: Place of this worker.
        measured: Digest of the measured cluster that this worker was given. Empty: none.

    Raises:
        DeadlineExceeded: Some ranks have not come in time. The message names them.
        Mismatch: Ranks have different numbers of workers or measured clusters, or two jobs use one
            meeting point.
        SecretError: A worker has no secret, or another one.
    """
    meeting = store.open_substore("hosts")
    entry = {
        "name": place.hostname,
        "machine": compute_machine_fingerprint(),
        "group": -1 if place.host_rank is None else place.host_rank,
        "address": find_own_address(place),
        "cores": count_cores(),
        "size": place.size,
        "measured": measured,
        "nonce": random.token_hex(16),
    }
    meeting.put(str(place.rank), entry)
    if place.rank == 0:
        _publish_table(meeting, place)
    # Rank 0 waits for `heard` if it fails: the store may end with it, and its reason too.
    try:
        table = meeting.take("table")
    except SecretError:
        meeting.put(f"heard/{place.rank}", True)
        raise
    if "error" in table:
        meeting.put(f"heard/{place.rank}", True)
        raise {"SecretError": SecretError, "DeadlineExceeded": DeadlineExceeded}.get(
            table["kind"], Mismatch
        )(table["error"])
    if table["ranks"][place.rank] != entry:
        raise Mismatch(
            f"rank {place.rank} is known to rank 0 as {table['ranks'][place.rank]}, and is "
            f"{entry}: two jobs use one meeting point. Give each job its own"
        )
    nonces = "".join(rank_entry["nonce"] for rank_entry in table["ranks"])
    store.bind_to_start(hashlib.sha256(nonces.encode()).hexdigest())
    return _group_ranks(table["ranks"])


def _publish_table(meeting: Store, place: Place) -> None:
    """Collect the entries of all ranks on rank 0, and publish them as a table, or an error."""
    try:
        ranks = _collect_entries(meeting, place)
    except (SecretError, DeadlineExceeded, Mismatch) as error:
        meeting.put("table", {"error": str(error), "kind": type(error).__name__})
        # The store may end with this process.
        _await_readers(meeting, place)
        raise
    meeting.put("table", {"ranks": ranks})


def _await_readers(meeting: Store, place: Place) -> None:
    """Wait until all ranks that have come have read the error."""
    end = time.monotonic() + place.timings.store.heard
    while time.monotonic() < end and any(
        meeting.has_keys([str(rank)]) and not meeting.has_keys([f"heard/{rank}"])
        for rank in range(1, place.size)
    ):
        time.sleep(_LONGEST_NAP)


def _collect_entries(meeting: Store, place: Place) -> list[dict[str, Any]]:
    """Collect the entries of all ranks, and check that they fit together."""
    # Rank 0 gives up first, so that the others read its error before their own deadline passes.
    end = time.monotonic() + 0.9 * meeting._deadline
    ranks: list[dict[str, Any]] = []
    for rank in range(place.size):
        try:
            ranks.append(meeting.take(str(rank), max(0.0, end - time.monotonic())))
        except DeadlineExceeded:
            missing = tuple(r for r in range(rank, place.size) if not meeting.torch.check([str(r)]))
            names = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
            raise DeadlineExceeded(
                (
                    f"{names} of {place.size} never came to the meeting at the start within "
                    f"{meeting._deadline:g} s: look at their output"
                ),
                missing,
            ) from None
        except SecretError as error:
            raise SecretError(f"rank {rank}: {error}") from None
    sizes = {entry["size"] for entry in ranks}
    if len(sizes) > 1:
        raise Mismatch(
            f"workers disagree on their number: {sorted(sizes)}. Start all of them with the "
            "same number of workers"
        )
    _compare_measured_clusters(ranks)
    # With several machines, none of their addresses may be a loopback address.
    if len({entry["machine"] for entry in ranks}) > 1:
        unreachable = [
            f"rank {rank} on {entry['name']}"
            for rank, entry in enumerate(ranks)
            if network.is_loopback(entry["address"])
        ]
        if unreachable:
            raise Mismatch(
                f"{unreachable[0]} is on a loopback address that other hosts can't reach: "
                f"{network.format_interface_advice()}"
            )
    return ranks


def _compare_measured_clusters(ranks: list[dict[str, Any]]) -> None:
    """Raise `Mismatch` if ranks were given different measured clusters, or only some have one."""
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
            "give all hosts --cluster with the same file, "
            "a copy of the file that `paceline probe` has written"
        )


def _group_ranks(ranks: list[dict[str, Any]]) -> Topology:
    """Group ranks into hosts. Hosts of the same name are numbered."""
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


def _serve_store(place: Place, deadline: float) -> TorchStore:
    """Serve the store on rank 0: on an inherited socket if there is one, or on a new one."""
    assert place.meeting is not None
    host, port = place.meeting
    timeout = timedelta(seconds=deadline)
    if place.store_fd is not None:
        # A copy: the descriptor stays open, so that a later start in this process can serve again.
        # `multi_tenant` joins the server of an earlier start if it still serves. Two servers on one
        # socket would divide the workers between them.
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
    chosen = _choose_bind_address(place)
    try:
        descriptor = network.open_listener(chosen, port).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise PlaceError(
                f"can't listen on {chosen}:{port} ({error.strerror}): "
                "set MASTER_PORT to another port"
            ) from error
        return _join_own_server(chosen, port, timeout)
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


def _join_own_server(chosen: str, port: int, timeout: timedelta) -> TorchStore:
    """Join a store that this process serves there already, after init_process_group.

    Raises `PlaceError` if it is another process that uses the port.
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


def _choose_bind_address(place: Place) -> str:
    """Choose the address of this machine on which rank 0 serves the store."""
    assert place.meeting is not None
    host = place.meeting[0]
    addresses = network.resolve_host(host)
    own = [candidate for candidate in addresses if network.is_own_address(candidate)]
    if not own:
        raise PlaceError(
            f"rank 0 runs on {place.hostname}, but the meeting point {host} "
            f"({', '.join(addresses)}) isn't an address of it: "
            "set MASTER_ADDR to one"
        )
    # The name of a host often means loopback on that host itself, which others can't reach.
    if network.is_loopback(own[0]) and place.hosts > 1:
        return find_own_address(place)
    return own[0]


def _connect_until(place: Place, left: float, deadline: float | None = None) -> TCPStore:
    """Try to connect until a server listens.

    torch could wait by itself, but can't be interrupted then, and its error names no rank.

    Args:
        place: Place of this worker.
        left: Seconds that remain for it.
        deadline: Seconds for errors, and for later waits. Default: `left`.
    """
    assert place.meeting is not None
    host, port = place.meeting
    end = time.monotonic() + left
    deadline = left if deadline is None else deadline
    nap = place.timings.store.shortest_retry
    while True:
        outcome = _connect_once(place, end - time.monotonic(), deadline)
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


def _connect_once(place: Place, left: float, deadline: float) -> TCPStore | Exception:
    """Try to connect once. Returns a client, or the error.

    An error may go away: names may resolve, and the server may listen, after this worker starts.

    Args:
        place: Place of this worker.
        left: Seconds that remain for it.
        deadline: Seconds that the client waits for an answer later.
    """
    assert place.meeting is not None
    host, port = place.meeting
    try:
        target = network.resolve_host(host)[0]
    except PlaceError as error:
        return error
    if network.is_loopback(target) and place.hosts > 1:
        # Among several hosts, a name that means loopback here means this host.
        target = find_own_address(place)
    try:
        # A plain connection first: it fails at once if no server listens, unlike torch's.
        socket.create_connection(
            (target, port), timeout=max(0.1, min(place.timings.store.connect, left))
        ).close()
        client = store_client.connect_client(target, port, max(1.0, left))
        store_client.limit_answer_time(client, deadline)
    except (OSError, DistError) as error:
        return error
    return client


def _follow_first_rank(place: Place, deadline: float) -> tuple[TCPStore, int]:
    """Find the store in which rank 0 has started once more often than this rank.

    Returns the store and the number of this start. Workers that start again in one process meet
    under new keys. The store of their last start may be about to end, so no worker stays in it to
    wait for rank 0. A worker first waits a short while for that end, because torch prints long
    errors if a store ends during a call.
    """
    assert place.meeting is not None
    end = time.monotonic() + deadline
    nap = place.timings.store.shortest_retry
    if (before := _LAST_SERVERS.pop(place.meeting, None)) is not None:
        before.wait(min(deadline, place.timings.store.ending))
        time.sleep(nap)  # the server may accept calls for another moment
    while True:
        store = _connect_until(place, max(0.0, end - time.monotonic()), deadline)
        try:
            claims = _claim_rank(store, place)
            if claims.add("starts/0", 0) > claims.add(f"starts/{place.rank}", 0):
                # A store of torchrun's agent doesn't end between two starts.
                if not place.agent_store:
                    _LAST_SERVERS[place.meeting] = store_client.ServerEndWaiter(store)
                return store, int(claims.add(f"starts/{place.rank}", 1))
        except DistError:
            # It has ended now, and the next one comes soon.
            nap = place.timings.store.shortest_retry
        del store
        if time.monotonic() + nap >= end:
            raise DeadlineExceeded(
                f"rank {place.rank} on {place.hostname} found a store at {place.meeting}, but rank "
                f"0 didn't come to it within {deadline:g} s: look at its output",
                (0,),
            )
        time.sleep(nap)
        nap = min(2 * nap, place.timings.store.longest_retry)


def _claim_rank(store: TorchStore, place: Place) -> TorchStore:
    """Claim this rank in the store for this process. Returns the part of the store with claims.

    Raises `PlaceError` if another process has claimed the rank.
    """
    claim = f"{compute_machine_fingerprint()}:{os.getpid()}"
    claims = PrefixStore(f"paceline/{place.attempt}/claims", store)
    owner = claims.compare_set(str(place.rank), "", claim).decode(errors="replace")
    if owner != claim:
        raise PlaceError(
            f"another process is already rank {place.rank} at {place.meeting}: "
            "two jobs share this meeting point, "
            "or two workers got the same RANK. Give each job its own MASTER_PORT"
        )
    return claims


def _make_store_error(error: Exception) -> WorkerLost:
    """Make the error for a store that is gone."""
    return WorkerLost(
        (
            "the store at the meeting point is gone, and rank 0 with it "
            f"({str(error).splitlines()[0]})"
        ),
        (0,),
    )
