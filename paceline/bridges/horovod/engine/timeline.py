"""A file of what the engine does and when, in the format of chrome://tracing.

NEGOTIATE_ALLREDUCE |-----------|
ALLREDUCE                       |-------|        one row for each name of an operation
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from paceline.bridges.horovod.engine.requests import OperationKey


class OperationTimeline:
    """Writes events until it is closed.

    Args:
        path: The file.
        mark_cycles: Whether each cycle of the controller is marked.
    """

    def __init__(self, path: str, *, mark_cycles: bool = False) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115, until `close`
        self._mark_cycles = mark_cycles
        self._begin = time.monotonic()
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._file.write("[\n")
        micros = int(time.time() * 1e6)
        self._write(
            {"name": "start", "ph": "M", "args": {"start_time_since_epoch_in_micros": micros}}
        )

    def write_operation(
        self, key: OperationKey, submitted: float, began: float, ended: float
    ) -> None:
        """Write one operation.

        Args:
            key: Its key.
            submitted: time.monotonic() when this rank submitted it.
            began: When all ranks had agreed on it.
            ended: When it was done.
        """
        kind = key.kind.upper()
        self._write_span(str(key), f"NEGOTIATE_{kind}", submitted, began)
        self._write_span(str(key), kind, began, ended)

    def write_cycle(self) -> None:
        """Mark that a cycle of the controller begins."""
        if self._mark_cycles:
            self._write(
                {
                    "name": "CYCLE_START",
                    "ph": "i",
                    "ts": self._microseconds(time.monotonic()),
                    "s": "g",
                }
            )

    def close(self) -> None:
        """End the file."""
        with self._lock:
            if not self._file.closed:
                self._file.write("{}\n]\n")
                self._file.close()

    def _write_span(self, row: str, name: str, began: float, ended: float) -> None:
        if row not in self._rows:
            self._rows[row] = len(self._rows) + 1
            self._write(
                {"name": "process_name", "ph": "M", "pid": self._rows[row], "args": {"name": row}}
            )
        start, end = self._microseconds(began), self._microseconds(ended)
        self._write(
            {
                "name": name,
                "ph": "X",
                "ts": start,
                "dur": end - start,
                "pid": self._rows[row],
                "tid": os.getpid(),
            }
        )

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + ",\n")

    def _microseconds(self, when: float) -> int:
        return max(0, int((when - self._begin) * 1e6))
