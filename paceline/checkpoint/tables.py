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
from paceline.checkpoint.files.file_layout import FileLayout, lay_out_snapshot
from paceline.errors import CheckpointError
from paceline.servers.run_tables import RunTable
from paceline.state.snapshot import DECODING_ERRORS, make_snapshot

TABLE_PREFIX = "table-"


def lay_out_tables(tables: Sequence[RunTable]) -> Iterator[tuple[str, FileLayout]]:
    """Yield the name and layout of each part. The first part of a table describes the table."""
    for table_number, table in enumerate(tables):
        spec, facts = table.lookup.spec, table.lookup.summarize_rows()
        header = {"name": table.name, "spec": spec.to_plain_data(), "count": facts["count"]}
        for part_number, part in enumerate(itertools.chain([{}], table.lookup.read_parts())):
            yield (
                f"{TABLE_PREFIX}{table_number:03d}-{part_number:05d}",
                lay_out_snapshot(make_snapshot({"head": header, "part": part}, copy=False)),
            )


def restore_tables(tables: Sequence[RunTable], loaded: Checkpoint) -> bytes:
    """Load saved tables into the servers.

    Raises `CheckpointError` before any row is changed, if the checkpoint has other tables.
    """
    names = sorted(name for name in loaded.extra_states if name.startswith(TABLE_PREFIX))
    try:
        headers = {
            name[: len(TABLE_PREFIX) + 3]: loaded.read_state(name).unpack_state()["head"]
            for name in names
            if name.endswith("-00000")
        }
        saved = [_describe_table(header["name"], header["spec"]) for header in headers.values()]
    except DECODING_ERRORS as error:
        raise CheckpointError(
            f"{loaded.path.name}: its sparse tables are not in the form in which a run saves them "
            f"({error}); use another checkpoint"
        ) from error
    current = [_describe_table(table.name, table.lookup.spec.to_plain_data()) for table in tables]
    if saved != current:
        raise CheckpointError(
            f"the checkpoint has the sparse tables {', '.join(saved) or 'none'}, and this run has "
            f"{', '.join(current) or 'none'}: build the same "
            "model and optimizers as in the run that saved it"
        )
    # Clearing makes all rows again from the seed. Then the parts replace the rows that were saved.
    for table, (prefix, header) in zip(tables, headers.items(), strict=True):
        table.lookup.clear_rows(header["spec"]["seed"], header["count"])
        for name in names:
            part = loaded.read_state(name).unpack_state()["part"] if name.startswith(prefix) else {}
            if part:
                table.lookup.load_part(part)
    return b""


def _describe_table(name: str, spec: dict[str, Any]) -> str:
    return f"{name} ({spec['rows']} x {spec['dim']} {spec['dtype']}, {spec['rule']})"
