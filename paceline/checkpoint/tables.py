"""Sparse tables in a checkpoint, in parts of some rows each.

Every part passes through the first worker.

servers   | rows 0 .. 65535 | 65536 .. |     one part is in the first worker's memory at a time,
                                             whatever the size of the table
disk      table-000-00000    table-000-00001 ...
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


def images(kept: Sequence[RunTable]) -> Iterator[tuple[str, FileLayout]]:
    """Yield the parts of all tables with their names: first what each table is, then its rows."""
    for number, table in enumerate(kept):
        spec, facts = table.lookup.spec, table.lookup.facts()
        head = {"name": table.name, "spec": spec.plain(), "count": facts["count"]}
        for place, part in enumerate(itertools.chain([{}], table.lookup.parts())):
            yield (
                f"{PREFIX}{number:03d}-{place:05d}",
                image(pack({"head": head, "part": part}, copy=False)),
            )


def restore(kept: Sequence[RunTable], found: Checkpoint) -> bytes:
    """Load saved tables into the servers.

    Raises `CheckpointError` for other tables than these, before any row is changed.
    """
    names = sorted(name for name in found.more if name.startswith(PREFIX))
    try:
        heads = {
            name[: len(PREFIX) + 3]: found.part(name).unpack()["head"]
            for name in names
            if name.endswith("-00000")
        }
        saved = [_form(head["name"], head["spec"]) for head in heads.values()]
    except UNREADABLE as error:
        raise CheckpointError(
            f"{found.path.name}: what it has of sparse tables is not what a run saves ({error}); "
            "use another one"
        ) from error
    here = [_form(table.name, table.lookup.spec.plain()) for table in kept]
    if saved != here:
        raise CheckpointError(
            f"the checkpoint has the sparse tables {', '.join(saved) or 'none'}, and here are "
            f"{', '.join(here) or 'none'}: build the same "
            "model and optimizers as in the run that saved it"
        )
    for table, (prefix, head) in zip(kept, heads.items(), strict=True):
        table.lookup.clear(head["spec"]["seed"], head["count"])
        for name in names:
            part = found.part(name).unpack()["part"] if name.startswith(prefix) else {}
            if part:
                table.lookup.put(part)
    return b""


def _form(name: str, spec: dict[str, Any]) -> str:
    return f"{name} ({spec['rows']} x {spec['dim']} {spec['dtype']}, {spec['rule']})"
