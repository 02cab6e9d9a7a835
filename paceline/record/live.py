"""Publishes the state of a run while it is under way, in `live.json` in its folder.

    log flushed ---+
    event noted ---+--> the summary so far --> .live.json.RANDOM --> live.json
    failed         --> the same once more, with the reason
    ended well     --> summary.json exists, and live.json is removed

The first worker replaces the file about once a second, by a rename, so a reader always finds a
whole file. It has the fields of `summary.json` that are known so far, and under `live` the current
state. If it can't be written, the run goes on and says so once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline.cluster import machine
from paceline.cluster.control.progress import read_birth
from paceline.formatting import list_message_lines
from paceline.record.folder import RunFolder, temporary_path, to_strict_json

# Events in the file; only the last ones are included.
MAX_EVENTS: Final = 200
# Seconds without a change after which a run whose writer has ended is over. If the run had
# survived, another worker would have written by then.
GONE_SECONDS: Final = 5.0
# Characters of the error that ended a run.
_MAX_REASON: Final = 300


class LiveRecord:
    """The live file of one run, on one worker.

    Args:
        folder: Folder of the run.
        writes: Tells whether this worker writes the file now.
        facts: Returns the fields that are known so far, with a dict under `live`.
        say: Function that is told when the file can't be written.
    """

    def __init__(
        self,
        folder: RunFolder,
        writes: Callable[[], bool],
        facts: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._is_writer, self._collect_facts, self._say = (
            folder.live,
            writes,
            facts,
            say,
        )
        self._writer = {
            "machine": _process_namespace(),
            "pid": os.getpid(),
            "born": read_birth(os.getpid()),
        }
        self._has_ended = False

    def update_file(self) -> None:
        """Write the current state, if this worker is the one that writes."""
        if not self._has_ended and self._is_writer():
            self._write_state({"state": "running"})

    def record_failure(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Record that the run ended in an error. The file stays, as there will be no summary."""
        if not self._has_ended and self._is_writer():
            words = " ".join(" ".join(list_message_lines(error)).split())
            self._write_state(
                {
                    "state": "failed",
                    "why": f"{kind.__name__}: {words}"[:_MAX_REASON] if words else kind.__name__,
                }
            )
        self._has_ended = True

    def remove_file(self) -> None:
        """Remove the file, because there is a summary now.

        Temporary files that killed writers left behind are removed, too.
        """
        if not self._has_ended and self._is_writer():
            for path in (self._path, *self._path.parent.glob(f".{self._path.name}.*")):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._has_ended = True

    def _write_state(self, state: Mapping[str, Any]) -> None:
        """Replace the file by the facts so far, with this state."""
        fields = self._collect_facts()
        fields["live"] |= {**state, "time": time.time(), "writer": self._writer}
        temporary = temporary_path(self._path)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(to_strict_json(fields) + "\n")
            # No fsync: the file need not survive a loss of power.
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._say(
                f"{self._path} can't be written ({error.strerror}): the run goes on, "
                "but can't be watched"
            )


def is_writer_alive(writer: Mapping[str, Any]) -> bool | None:
    """Whether the process that wrote a file still runs; None if it is on another machine."""
    if writer.get("machine") != _process_namespace() or not isinstance(
        pid := writer.get("pid"), int
    ):
        return None
    return read_birth(pid) == writer.get("born")


def _process_namespace() -> str:
    """Return an identifier shared by all processes that can see each other's process ids."""
    # Process ids are valid inside one PID namespace (such as a container) of one booted machine.
    try:
        return f"{machine.identify_boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine.identify_boot()
