"""The last words of a worker: of what it wrote, the traceback of the error that ended it.

Traceback (most recent call last):         the first line of a traceback
  File ...                                 indented: more of it
KeyError: 1                                names the error; its message may go on

During handling of the above exception...  joins it to the next one: together they are one report
Traceback (most recent call last):
...
Exception ignored in: <function ...>       the next traceback is of an error that ended nobody
Traceback (most recent call last):
...
goodbye                                    written at exit
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

TRACEBACK: Final = "Traceback (most recent call last):"
CHAINED: Final = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_GROUP: Final = "  + Exception Group Traceback (most recent call last):"
# the end of the last group in it, which may be a group itself
_GROUP_LINE, _GROUP_END = "  | ", re.compile(r" {4,}\+-{36}$")
# its name, behind that of its module
_ERROR: Final = re.compile(r"(?:  \| )?(?:[\w.<>]+\.)?(\w+)(?::|$)")
# what stands before the traceback of an error that ended nobody
_ASIDE: Final = re.compile(
    r"Exception ignored |Exception in thread |Error in atexit|Process \S+:$|--- Logging "
    r"error|(future|task|handle): <"
)
_SHOWN: Final = 20  # lines of what has no traceback, or whose traceback came long before


@dataclass(frozen=True)
class _Report:
    """What was written of one error and those that led to it: the lines [start, error], and the
    names of the errors, the last one last.
    """

    start: int
    error: int
    kinds: tuple[str, ...]
    aside: bool


def last_words(tail: str, kind: str | None = None, more: int | None = None) -> str:
    """Return the traceback of the error that ended who wrote this, without what was written after
    it; else the last lines.

    `kind`: the name of that error, if it is known; `more`: how many lines follow the first of its
    message.
    """
    lines = tail.splitlines()
    reports = [*_reports(lines)]
    starts = [report.start for report in reports] + [len(lines)]
    ended = [
        index for index, report in enumerate(reports) if kind in report.kinds and not report.aside
    ]
    if ended:
        report, end = reports[ended[-1]], starts[ended[-1] + 1]
        if more is not None and report.kinds[-1] == kind:
            end = min(end, report.error + 1 + more)
        return "\n".join(lines[report.start : end]).rstrip()
    guessed = [index for index, report in enumerate(reports) if not report.aside]
    if guessed and starts[guessed[-1] + 1] - reports[guessed[-1]].error <= _SHOWN:
        return "\n".join(lines[reports[guessed[-1]].start : starts[guessed[-1] + 1]]).rstrip()
    return "\n".join(lines[-_SHOWN:])


def error_lines(words: str) -> list[str]:
    """Return of last words the lines that name the error, with its message; none where there is
    no traceback in them.
    """
    lines = words.splitlines()
    reports = [*_reports(lines)]
    return lines[reports[-1].error :] if reports else []


def _reports(lines: Sequence[str]) -> Iterator[_Report]:
    """Find the reports of errors, in order."""
    open_report: _Report | None = None
    index = 0
    while index < len(lines):
        if not lines[index].startswith((TRACEBACK, _GROUP, _GROUP_LINE)):
            index += 1
            continue
        start, error, end = index, *_traceback(lines, index)
        found = _ERROR.match(lines[error]) if error < len(lines) else None
        kinds = () if found is None else (found[1],)
        if open_report is not None and any(
            line.startswith(CHAINED) for line in lines[open_report.error + 1 : start]
        ):
            open_report = _Report(
                open_report.start, end, (*open_report.kinds, *kinds), open_report.aside
            )
        else:
            if open_report is not None:
                yield open_report
            aside = start > 0 and _ASIDE.match(lines[start - 1]) is not None
            open_report = _Report(start - aside, end, kinds, aside)
        index = end + 1
    if open_report is not None:
        yield open_report


def _traceback(lines: Sequence[str], start: int) -> tuple[int, int]:
    """Return the line that names the error of the traceback that starts there, and its last line
    that is known to be of it.
    """
    if not lines[start].startswith(TRACEBACK):
        stop = next(
            (i for i in range(start + 1, len(lines)) if lines[i].startswith((TRACEBACK, _GROUP))),
            len(lines),
        )
        error = next((i for i in range(start, stop) if re.match(r"  \| \S", lines[i])), stop)
        return error, max(
            (i for i in range(error, stop) if _GROUP_END.match(lines[i])), default=stop - 1
        )
    error = next(
        (i for i in range(start + 1, len(lines)) if not lines[i].startswith(" ")), len(lines)
    )
    return error, error
