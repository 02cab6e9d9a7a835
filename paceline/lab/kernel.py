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
from paceline.lab.spaces import Space, become_root


@dataclass(frozen=True)
class Ability:
    """An ability of the machine that a lab needs.

    `reason` says why it is missing; empty if it is there.
    """

    name: str
    purpose: str
    needed: bool
    reason: str = ""


_RATE: Final = 10**6


def abilities() -> list[Ability]:
    """Try out all abilities that a lab may want."""
    checked = []
    for name, purpose, needed, attempt in _attempts():
        try:
            attempt()
        except ResourceError as error:
            checked.append(Ability(name, purpose, needed, str(error)))
        else:
            checked.append(Ability(name, purpose, needed))
    return checked


def missing() -> str:
    """Reason why no lab can run here, in one line; empty if one can."""
    return "; ".join(
        f"{ability.name}: {ability.reason}"
        for ability in abilities()
        if ability.needed and ability.reason
    )


def check_rights() -> None:
    """Raise `ResourceError` if this process may not make a network of its own."""
    try:
        Space.make(["net"]).close()
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


def ready_for(description: Description) -> list[str]:
    """Raise `ResourceError` for missing abilities that this description needs; return what is
    left out, where it allows that.
    """
    if all(host.delay is None for host in description.hosts):
        return []
    try:
        _netem()
    except ResourceError as error:
        if description.needs_delay:
            raise ResourceError(
                f"{description.name} has links with delay, and this kernel has no netem: "
                "load the module sch_netem, remove `delay`, "
                'or write delays = "where-possible" to do without'
            ) from error
        return [f"this kernel has no netem: the links of {description.name} have no delay here"]
    return []


def _attempts() -> Iterator[tuple[str, str, bool, Callable[[], object]]]:
    yield (
        "namespaces",
        "hosts with a network, a name and shared memory of their own",
        True,
        _namespaces,
    )
    yield "veth, bridge", "links between hosts", True, _wires
    yield "tbf", "bandwidth of links", True, partial(_discipline, "tbf", **links.shape(_RATE))
    yield (
        "htb",
        "(an alternative to tbf, which labs don't use)",
        False,
        partial(_discipline, "htb", default=0),
    )
    yield "netem", "delay of links", False, _netem
    yield "control group cpu", "processors of a host", False, partial(cgroups.find, "cpu")
    yield "control group memory", "memory of a host", False, partial(cgroups.find, "memory")


def _namespaces() -> None:
    Space.make(("net", "uts", "ipc", "mnt")).close()


def _wires() -> None:
    switch, host = Space.make(["net"]), Space.make(["net"])
    try:
        links.lay(switch, 0)
        links.plug(switch, host, 0, None)
    finally:
        host.close()
        switch.close()


def _netem() -> None:
    _discipline("netem", delay=1000, limit=10)


def _discipline(kind: str, **options: int) -> None:
    """Put a queueing discipline on to loopback, in a network of its own."""
    space = Space.make(["net"])
    try:
        links.queue(space, "lo", kind, **options)
    except ResourceError as error:
        raise ResourceError(
            f"this kernel doesn't have it; the module sch_{kind} would bring it"
        ) from error
    finally:
        space.close()
