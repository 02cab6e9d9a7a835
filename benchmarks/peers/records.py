"""What was measured so far, a JSON line for each thing; what is there needn't be measured again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
KEYS = {
    "header": ("when",),
    "environment": ("environment",),
    "reference": ("model", "workers", "steps", "seed", "code"),
    "buckets": ("cell", "steps", "seed"),
    "round": ("cell", "peer", "round", "steps", "seed"),
    "learning": ("way", "sync", "model", "batch", "steps", "rate", "seed"),
    "race": ("way", "sync", "model", "batch", "steps", "rate", "seed"),
}


class Records:
    """A file of JSON lines. A later record with the same key counts instead of an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._all: dict[tuple[Any, ...], Record] = {}
        if path.exists():
            for line in _whole_lines(path.read_text()):
                record = json.loads(line)
                self._all[_key(record)] = record

    def add(self, record: Record) -> Record:
        """Keep a record, on disk before this returns."""
        _key(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a run that was killed while it wrote
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a") as file:
            file.write("\n" * torn + json.dumps(record) + "\n")
        self._all[_key(record)] = record
        return record

    def find(self, kind: str, **key: Any) -> Record | None:
        """The record of this kind and key, if there is one."""
        return self._all.get(_key({"kind": kind, **key}))

    def each(self, kind: str) -> Iterator[Record]:
        """All records of a kind, in the order of their first writing."""
        return (record for record in self._all.values() if record["kind"] == kind)


def _key(record: Record) -> tuple[Any, ...]:
    return (record["kind"], *(record[name] for name in KEYS[record["kind"]]))


def _whole_lines(text: str) -> list[str]:
    """All lines but those that were cut off by a death."""
    lines = text.splitlines()
    return [line for line in lines if line.startswith("{") and line.endswith("}")]
