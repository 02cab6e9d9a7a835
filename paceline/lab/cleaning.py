"""Cleans up after labs that were killed together with their keepers."""

from __future__ import annotations

from contextlib import suppress

from paceline.errors import ResourceError
from paceline.lab import cgroups, remains


def remove_leftovers() -> list[str]:
    """Remove all leftovers of this user's dead labs; return a line for each lab and group.

    Labs that run are left alone.
    """
    done = []
    try:
        records = remains.read_records()
        remains.drop_partial_records()
    except PermissionError as error:
        raise ResourceError(
            f"{error.filename} has the records of labs, and {error.strerror}: "
            "remove it, or give it to you"
        ) from error
    for record in records:
        if remains.is_alive(record):
            continue
        left = remains.sweep_lab(record, trusted=False)
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
    groups = cgroups.list_orphans(_find_bases())
    known = {record["identity"] for record in remains.read_records()}
    for folder in groups:
        identity = folder.name.removeprefix(cgroups.PREFIX).partition("-")[0]
        # processes inside may have a record that this user can't see
        if identity not in known and not remains.processes_in_groups([str(folder)]):
            with suppress(FileNotFoundError):  # another process cleans too
                cgroups.remove_group(folder)
            done.append(f"control group {folder} is removed")
    return done


def _find_bases() -> list[cgroups.CgroupBase]:
    bases = []
    for controller in ("cpu", "memory"):
        with suppress(ResourceError):
            bases.append(cgroups.find_base(controller))
    return bases
