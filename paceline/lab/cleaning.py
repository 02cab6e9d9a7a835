"""Removes the leftovers of labs that were killed together with their keepers."""

from __future__ import annotations

from contextlib import suppress

from paceline.errors import ResourceError
from paceline.lab import cgroups, remains


def remove_leftovers() -> list[str]:
    """Remove all leftovers of this user's dead labs.

    Labs that are still running stay untouched.

    Returns:
        One line of text for each lab and each control group that was removed.

    Raises:
        ResourceError: The records can't be read, or something can't be removed.
    """
    report = []
    try:
        records = remains.read_records()
        remains.drop_partial_records()
    except PermissionError as error:
        raise ResourceError(
            f"the records of labs in {error.filename} can't be read ({error.strerror}): "
            "remove that folder, or make yourself its owner"
        ) from error
    for record in records:
        if remains.is_alive(record):
            continue
        # The lab is dead, so the kernel may have given its networks' numbers to another lab.
        leftovers = remains.sweep_lab(record, trusted=False)
        if leftovers:
            raise ResourceError(
                f"lab {record['identity']} ({record['name']}) has leftovers that can't be "
                f"removed: {', '.join(leftovers)}; end or delete them, then clean again"
            )
        report.append(
            f"lab {record['identity']} ({record['name']}) was killed: "
            "its processes, control groups and files are removed"
        )
    # The groups are listed before the records are read. A lab writes its record before it makes its
    # groups, so a lab that starts at this moment is never taken for a dead one.
    groups = cgroups.list_orphans(_find_bases())
    recorded_identities = {record["identity"] for record in remains.read_records()}
    for folder in groups:
        identity = folder.name.removeprefix(cgroups.PREFIX).partition("-")[0]
        # A group with processes inside may belong to a lab whose record this user can't see.
        if identity not in recorded_identities and not remains.processes_in_groups([str(folder)]):
            # Another process may be cleaning at the same time.
            with suppress(FileNotFoundError):
                cgroups.remove_group(folder)
            report.append(f"control group {folder} is removed")
    return report


def _find_bases() -> list[cgroups.CgroupBase]:
    """Find the parents of all labs' control groups, for each controller that is available."""
    bases = []
    for controller in ("cpu", "memory"):
        with suppress(ResourceError):
            bases.append(cgroups.find_base(controller))
    return bases
