"""What W&B keeps of an offline run: records in blocks, as LevelDB's logs have them, each a
message of W&B's own protocol.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FULL, LAST = 32_768, 1, 4


def records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")  # nothing was written yet
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # it is being written
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def values(items: Any) -> dict[str, Any]:
    """The values of a history, a config or a summary, by name."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


class OfflineRun:
    """An offline run as it is read back."""

    def __init__(self, folder: Path) -> None:
        path = next(folder.glob("run-*.wandb"), None)
        self.history: dict[int, dict[str, Any]] = {}
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.id = self.name = self.project = ""
        self.exit: int | None = None
        for record in records(path) if path is not None else ():
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id, self.name, self.project = (
                    record.run.run_id,
                    record.run.display_name,
                    record.run.project,
                )
                self.config |= values(record.run.config.update)
            elif kind == "config":
                self.config |= values(record.config.update)
            elif kind == "summary":
                self.summary |= values(record.summary.update)
            elif kind == "history":
                found = values(record.history.item)
                self.history.setdefault(int(found["_step"]), {}).update(found)
            elif kind == "exit":
                self.exit = record.exit.exit_code
