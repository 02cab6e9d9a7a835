"""The kernel's abilities for a lab: each is tried in a network that is thrown away, and a
missing one has its reason.
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

    `reason` says why it is missing; empty if it is there.
    """

    name: str
    purpose: str
    needed: bool
    reason: str = ""


_RATE: Final = 10**6


def try_abilities() -> list[KernelAbility]:
    """Try out all abilities that a lab may want."""
    checked = []
    for name, purpose, needed, attempt in _list_attempts():
        try:
            attempt()
        except ResourceError as error:
            checked.append(KernelAbility(name, purpose, needed, str(error)))
        else:
            checked.append(KernelAbility(name, purpose, needed))
    return checked


def find_missing() -> str:
    """Reason why no lab can run here, in one line; empty if one can."""
    return "; ".join(
        f"{ability.name}: {ability.reason}"
        for ability in try_abilities()
        if ability.needed and ability.reason
    )


def check_rights() -> None:
    """Raise `ResourceError` if this process may not make a network of its own."""
    try:
        NamespaceSet.make_namespaces(["net"]).close()
    except ResourceError as error:
        raise ResourceError(
            "a lab needs root, or to be root in a user namespace: use `paceline lab run`, which "
            "enters one, or start this program with `unshare --user --map-root-user` before it"
        ) from error


def seek_rights() -> str:
    """Enter a user namespace, for good, unless this process is root, so that it may build a lab.

    Returns the outcome in words.

    The process must have one thread. Raises `ResourceError` if it can't be done.
    """
    try:
        check_rights()
    except ResourceError:
        try:
            become_root()
        except ResourceError as error:
            raise ResourceError(
                f"this user hasn't root's rights, and may have no user namespace ({error}): "
                "allow them (sysctl user.max_user_namespaces, "
                "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns), "
                "or run as root"
            ) from error
        return "a user namespace, so without quotas of processors and memory"
    return "root, or root in a user namespace"


def check_abilities(description: Description) -> list[str]:
    """Raise `ResourceError` for missing abilities that this description needs; return what is
    left out, where it allows that.
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
    """Put a queueing discipline on to loopback, in a network of its own."""
    space = NamespaceSet.make_namespaces(["net"])
    try:
        links.set_queue(space, "lo", kind, **options)
    except ResourceError as error:
        raise ResourceError(
            f"this kernel doesn't have it; the module sch_{kind} would bring it"
        ) from error
    finally:
        space.close()
