"""Tells of a run while it is under way: `live.json` in its folder, which the first worker replaces
about once a second.

    log flushed ---+
    event noted ---+--> what is known now --> .live.json.PID --> live.json      a reader finds it whole
    failed         --> the same, once more, with why
    ended well     --> summary.json is there, and live.json goes

It has the fields of `summary.json` that are known so far, and under `live` what is of this moment
alone. Where it can't be written the run goes on, and says so once.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from paceline.cluster import machine
from paceline.cluster.control.progress import birth
from paceline.formatting import message
from paceline.record.folder import RunFolder, beside, strict_json

EVENTS: Final = 200  # that are told while a run is under way, the last ones
# seconds without a change after which a run whose writer is no more has ended: another worker would
# have gone on
GONE: Final = 5.0
_LONGEST: Final = 300  # characters of the error that has ended a run


class LiveRecord:
    """The file of one run, on one worker.

    `writes`: whether this worker writes it now; `facts`: what is known of the run so far.

    `say` is told when the file can't be written.
    """

    def __init__(
        self,
        folder: RunFolder,
        writes: Callable[[], bool],
        facts: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._path, self._writes, self._facts, self._say = folder.live, writes, facts, say
        self._writer = {"machine": _machine(), "pid": os.getpid(), "born": birth(os.getpid())}
        self._over = False

    def update(self) -> None:
        """Write what is known now, if this is the worker that does so."""
        if not self._over and self._writes():
            self._put({"state": "running"})

    def fail(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Write that the run has ended in an error. The file stays, as there will be no summary."""
        if not self._over and self._writes():
            words = " ".join(" ".join(message(error)).split())
            self._put(
                {
                    "state": "failed",
                    "why": f"{kind.__name__}: {words}"[:_LONGEST] if words else kind.__name__,
                }
            )
        self._over = True

    def end(self) -> None:
        """Remove the file, as there is a summary now, and what writers that were killed have
        left of theirs.
        """
        if not self._over and self._writes():
            for path in (self._path, *self._path.parent.glob(f".{self._path.name}.*")):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._over = True

    def _put(self, state: Mapping[str, Any]) -> None:
        fields = self._facts()
        fields["live"] |= {**state, "time": time.time(), "writer": self._writer}
        temporary = beside(self._path)
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(strict_json(fields) + "\n")
            # nothing waits for the disk: it need not outlast a loss of power
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._say(
                f"{self._path} can't be written ({error.strerror}): the run goes on, but can't be "
                "watched"
            )


def alive(writer: Mapping[str, Any]) -> bool | None:
    """Whether the process that has written a file is still there; None where that can't be seen,
    as it is on another machine.
    """
    if writer.get("machine") != _machine() or not isinstance(pid := writer.get("pid"), int):
        return None
    return birth(pid) == writer.get("born")


def _machine() -> str:
    """Return what is the same for all processes that see each other by their numbers."""
    try:
        return f"{machine.boot()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return machine.boot()
