"""Sparse tables in a checkpoint, divided into parts of some rows each.

All parts pass through the first worker, which has one part in memory at a time. So a table may be
larger than its memory.

servers   |  (the table)   | rows 0 .. 65535 | rows 65536 .. |
disk      table-000-00000   table-000-00001   table-000-00002 ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.checkpoint.files.checkpoint import Checkpoint
from paceline.checkpoint.files.file_layout import FileLayout, image
from paceline.errors import CheckpointError
from paceline.servers.run_tables import RunTable
from paceline.state.snapshot import UNREADABLE, pack

PREFIX = "table-"


def images(tables: Sequence[RunTable]) -> Iterator[tuple[str, FileLayout]]:
    """Yield the names and layouts of all parts. The first part of a table describes it."""
    for table_number, table in enumerate(tables):
        spec, facts = table.lookup.spec, table.lookup.facts()
        header = {"name": table.name, "spec": spec.plain(), "count": facts["count"]}
        for part_number, part in enumerate(itertools.chain([{}], table.lookup.parts())):
            yield (
                f"{PREFIX}{table_number:03d}-{part_number:05d}",
                image(pack({"head": header, "part": part}, copy=False)),
            )


def restore(tables: Sequence[RunTable], loaded: Checkpoint) -> bytes:
    """Load saved tables into the servers.

    Raises `CheckpointError` before any row is changed, if the checkpoint has other tables.
    """
    names = sorted(name for name in loaded.more if name.startswith(PREFIX))
    try:
        headers = {
            name[: len(PREFIX) + 3]: loaded.part(name).unpack()["head"]
            for name in names
            if name.endswith("-00000")
        }
        saved = [_form(header["name"], header["spec"]) for header in headers.values()]
    except UNREADABLE as error:
        raise CheckpointError(
            f"{loaded.path.name}: its sparse tables are not in the form in which a run saves them "
            f"({error}); use another checkpoint"
        ) from error
    current = [_form(table.name, table.lookup.spec.plain()) for table in tables]
    if saved != current:
        raise CheckpointError(
            f"the checkpoint has the sparse tables {', '.join(saved) or 'none'}, and this run has "
            f"{', '.join(current) or 'none'}: build the same "
            "model and optimizers as in the run that saved it"
        )
    # Rows that aren't in the checkpoint are made again from the seed. The parts put the others.
    for table, (prefix, header) in zip(tables, headers.items(), strict=True):
        table.lookup.clear(header["spec"]["seed"], header["count"])
        for name in names:
            part = loaded.part(name).unpack()["part"] if name.startswith(prefix) else {}
            if part:
                table.lookup.put(part)
    return b""


def _form(name: str, spec: dict[str, Any]) -> str:
    return f"{name} ({spec['rows']} x {spec['dim']} {spec['dtype']}, {spec['rule']})"
