"""Cleans up after labs that were killed together with their keepers."""

from __future__ import annotations

from contextlib import suppress

from paceline.errors import ResourceError
from paceline.lab import cgroups, remains


def clean() -> list[str]:
    """Remove all leftovers of this user's dead labs; return a line for each lab and group.

    Labs that run are left alone.
    """
    done = []
    try:
        records = remains.read_all()
        remains.drop_halves()
    except PermissionError as error:
        raise ResourceError(
            f"{error.filename} has the records of labs, and {error.strerror}: "
            "remove it, or give it to you"
        ) from error
    for record in records:
        if remains.alive(record):
            continue
        left = remains.sweep(record, trusted=False)
        if left:
            raise ResourceError(
                f"of lab {record['identity']} ({record['name']}) this can't be removed: "
                f"{', '.join(left)}; end it, and clean again"
            )
        done.append(
            f"lab {record['identity']} ({record['name']}) was killed: "
            "its processes, control groups and files are removed"
        )
    # before the records: a lab that begins now has its record before its groups
    groups = cgroups.orphans(_bases())
    known = {record["identity"] for record in remains.read_all()}
    for folder in groups:
        identity = folder.name.removeprefix(cgroups.PREFIX).partition("-")[0]
        # processes inside may have a record that this user can't see
        if identity not in known and not remains.grouped([str(folder)]):
            with suppress(FileNotFoundError):  # another process cleans too
                cgroups.remove(folder)
            done.append(f"control group {folder} is removed")
    return done


def _bases() -> list[cgroups.Base]:
    bases = []
    for controller in ("cpu", "memory"):
        with suppress(ResourceError):
            bases.append(cgroups.find(controller))
    return bases
