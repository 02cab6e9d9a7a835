"""The resources that a host brings to a job: its secret, addresses, sockets and timings."""

from __future__ import annotations

import secrets as random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from paceline.cluster import machine, network, secret
from paceline.cluster.control import commands
from paceline.cluster.discover import read_timings
from paceline.cluster.hosts.peers import Offer
from paceline.cluster.launcher import hints
from paceline.cluster.launcher.output import print_message
from paceline.cluster.launcher.request import LaunchRequest, parse_meeting_point
from paceline.timings import Timings


@dataclass(frozen=True)
class HostResources:
    """What a host brings to the job."""

    secret: bytes
    offer: Offer
    store_listeners: list[socket.socket]  # on which workers serve their stores
    agent_listener: socket.socket | None  # on which the launcher is called, if losses are survived
    progress_folder: str | None  # the folder of the workers' progress pages, if they are observed
    timings: Timings
    until_job_ends: ExitStack  # closed when the job is over on this host
    until_workers_start: ExitStack  # closed when the workers have started, which have inherited it


def reserve_resources(
    job: LaunchRequest, environ: Mapping[str, str], held: ExitStack, inherited: ExitStack
) -> HostResources:
    """Get the job's secret, choose this host's address, and open the sockets for its ports.

    `held` is closed when the job is over on this host, `inherited` when its workers have started.
    """
    key = get_shared_secret(job, environ)
    if not job.is_quiet:
        print_message(hints.describe_start(job.script, job.workers, job.join))
    interface = environ.get("PACELINE_INTERFACE")
    address = "127.0.0.1" if interface is None else network.resolve_interface(interface)
    if job.join is not None and interface is None:
        address = network.find_local_address(
            network.resolve_host(parse_meeting_point(job.join)[0])[0]
        )
    survives = job.min_workers is not None
    # If losses are survived, any worker may have to serve the store of a later view.
    stores = [
        inherited.enter_context(network.open_listener(address))
        for _ in range(job.workers if survives else 1)
    ]
    worker_numbers = (
        tuple(
            commands.make_worker_number(random.randbits(32), store.getsockname()[1])
            for store in stores
        )
        if survives
        else ()
    )
    # torch binds this port later. Until the job is over nothing else on this host may take it.
    master_port_holder = held.enter_context(network.reserve_port(address))
    ports = (stores[0].getsockname()[1], master_port_holder.getsockname()[1])
    agent = held.enter_context(network.open_listener(address)) if survives else None
    agent_port = 0 if agent is None else agent.getsockname()[1]
    own_address = (
        socket.gethostname(),
        job.workers,
        address,
        machine.compute_machine_fingerprint(),
    )
    offer = Offer(*own_address, *ports, job.placement, worker_numbers, agent_port)
    progress_folder = environ.get("PACELINE_PROGRESS")
    return HostResources(
        key, offer, stores, agent, progress_folder, read_timings(environ), held, inherited
    )


def get_shared_secret(job: LaunchRequest, environ: Mapping[str, str]) -> bytes:
    """Get the job's secret: from the file, from PACELINE_SECRET, or, on one host, a new one.

    Raises `SecretError` if several hosts need one, and none is given.
    """
    if job.secret_file is not None:
        return secret.read_secret(job.secret_file)
    if environ.get("PACELINE_SECRET"):
        return secret.parse_secret(environ["PACELINE_SECRET"], "PACELINE_SECRET")
    if job.join is None:
        return secret.make_secret()
    raise secret.make_secret_error(
        f"a job of {job.hosts} hosts needs a secret that they share"
        if job.hosts > 1
        else "--join needs a secret that hosts share"
    )
