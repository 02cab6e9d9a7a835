"""The abilities of the kernel that a lab needs.

Each one is tried out in a network that is thrown away. A missing ability comes with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from paceline.errors import ResourceError
from paceline.lab import cgroups, links
from paceline.lab.description import Description
from paceline.lab.spaces import NamespaceSet, become_root


@dataclass(frozen=True)
class KernelAbility:
    """An ability of the machine that a lab needs.

    `reason` says why the ability is missing. It is empty if the machine has the ability.
    """

    name: str
    purpose: str
    needed: bool
    reason: str = ""


_RATE: Final = 10**6  # of the trial with tbf; any rate will do


def try_abilities() -> list[KernelAbility]:
    """Try out all abilities that a lab may use."""
    abilities = []
    for name, purpose, needed, attempt in _list_attempts():
        try:
            attempt()
        except ResourceError as error:
            abilities.append(KernelAbility(name, purpose, needed, str(error)))
        else:
            abilities.append(KernelAbility(name, purpose, needed))
    return abilities


def find_missing() -> str:
    """Find the reasons why no lab can run here, in one line; empty if one can run."""
    return "; ".join(
        f"{ability.name}: {ability.reason}"
        for ability in try_abilities()
        if ability.needed and ability.reason
    )


def check_rights() -> None:
    """Raise `ResourceError` if this process may not make a network namespace."""
    try:
        NamespaceSet.make_namespaces(["net"]).close()
    except ResourceError as error:
        raise ResourceError(
            "a lab needs root, or to be root in a user namespace: use `paceline lab run`, which "
            "enters one, or start this program with `unshare --user --map-root-user` before it"
        ) from error


def seek_rights() -> str:
    """Get the rights to build a lab: a process that isn't root enters a user namespace, for good.

    The process must have one thread only.

    Returns:
        The rights that it has now, in words.

    Raises:
        ResourceError: The process isn't root, and may not enter a user namespace.
    """
    try:
        check_rights()
    except ResourceError:
        try:
            become_root()
        except ResourceError as error:
            raise ResourceError(
                f"this user isn't root, and may not make a user namespace ({error}): "
                "allow user namespaces (sysctl user.max_user_namespaces, "
                "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), "
                "or run as root"
            ) from error
        return "a user namespace, so without quotas of processors and memory"
    return "root, or root in a user namespace"


def check_abilities(description: Description) -> list[str]:
    """Check that this kernel can build a cluster.

    Returns notes on parts that are left out, if the description allows that. Raises
    `ResourceError` if it needs an ability that is missing.
    """
    if all(host.delay is None for host in description.hosts):
        return []
    try:
        _try_netem()
    except ResourceError as error:
        if description.needs_delay:
            raise ResourceError(
                f"{description.name} has links with delay, and this kernel has no netem: "
                "load the module sch_netem, remove `delay`, "
                'or write delays = "where-possible" to do without'
            ) from error
        return [f"this kernel has no netem: the links of {description.name} have no delay here"]
    return []


def _list_attempts() -> Iterator[tuple[str, str, bool, Callable[[], object]]]:
    """List each ability: its name, its purpose, whether labs need it, and a call that tries it."""
    yield (
        "namespaces",
        "hosts with a network, a name and shared memory of their own",
        True,
        _try_namespaces,
    )
    yield "veth, bridge", "links between hosts", True, _try_wires
    yield (
        "tbf",
        "bandwidth of links",
        True,
        partial(_try_discipline, "tbf", **links.compute_bucket(_RATE)),
    )
    yield (
        "htb",
        "(an alternative to tbf, which labs don't use)",
        False,
        partial(_try_discipline, "htb", default=0),
    )
    yield "netem", "delay of links", False, _try_netem
    yield "control group cpu", "processors of a host", False, partial(cgroups.find_base, "cpu")
    yield "control group memory", "memory of a host", False, partial(cgroups.find_base, "memory")


def _try_namespaces() -> None:
    NamespaceSet.make_namespaces(("net", "uts", "ipc", "mnt")).close()


def _try_wires() -> None:
    switch, host = NamespaceSet.make_namespaces(["net"]), NamespaceSet.make_namespaces(["net"])
    try:
        links.lay_bridges(switch, 0)
        links.plug_host(switch, host, 0, None)
    finally:
        host.close()
        switch.close()


def _try_netem() -> None:
    _try_discipline("netem", delay=1000, limit=10)


def _try_discipline(kind: str, **options: int) -> None:
    """Set a queueing discipline on the loopback device of a new network."""
    space = NamespaceSet.make_namespaces(["net"])
    try:
        links.set_queue(space, "lo", kind, **options)
    except ResourceError as error:
        raise ResourceError(f"this kernel doesn't have it: load the module sch_{kind}") from error
    finally:
        space.close()
