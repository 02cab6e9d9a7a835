"""The last words of a worker: the part of its output that tells why it ended.

That is the traceback of the error that ended it:

    Traceback (most recent call last):         the first line of a traceback
      File ...                                 indented lines are part of it
    KeyError: 1                                names the error; its message may have more lines

    During handling of the above exception...  joins it to the next one: together they are a report
    Traceback (most recent call last):
    ...
    Exception ignored in: <function ...>       the next traceback is *aside*: it ended nothing
    Traceback (most recent call last):
    ...
    goodbye                                    written at exit
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

TRACEBACK_LINE: Final = "Traceback (most recent call last):"
CHAINED_PREFIXES: Final = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_GROUP_TRACEBACK_LINE: Final = "  + Exception Group Traceback (most recent call last):"
# A line inside an exception group, and the last line of the last group in it
_GROUP_PREFIX, _GROUP_END_PATTERN = "  | ", re.compile(r" {4,}\+-{36}$")
# Name of an error, behind that of its module
_ERROR_PATTERN: Final = re.compile(r"(?:  \| )?(?:[\w.<>]+\.)?(\w+)(?::|$)")
# Line before the traceback of an error that didn't end the process
_ASIDE_PATTERN: Final = re.compile(
    r"Exception ignored |Exception in thread |Error in atexit|Process \S+:$|--- Logging "
    r"error|(future|task|handle): <"
)
_MOST_LINES: Final = 20  # lines shown if there is no traceback, or if it came long before the end


@dataclass(frozen=True)
class _ErrorReport:
    """The report of one error and of the errors that led to it: one or more chained tracebacks.

    Args:
        start: Index of its first line.
        error: Index of the line that names the last error.
        kinds: Names of the errors, the last one last.
        aside: Whether its error didn't end the process.
    """

    start: int
    error: int
    kinds: tuple[str, ...]
    is_aside: bool


def extract_last_words(tail: str, kind: str | None = None, more: int | None = None) -> str:
    """Find the traceback of the error that ended a worker, without the lines written after it.

    Args:
        tail: Last output of the worker.
        kind: Name of that error, if it is known.
        more: Number of lines that its message has after the first, if that is known.

    Returns:
        The traceback; or the last 20 lines if none is found.
    """
    lines = tail.splitlines()
    reports = [*_find_reports(lines)]
    starts = [report.start for report in reports] + [len(lines)]
    ended = [
        index
        for index, report in enumerate(reports)
        if kind in report.kinds and not report.is_aside
    ]
    if ended:
        report, end = reports[ended[-1]], starts[ended[-1] + 1]
        if more is not None and report.kinds[-1] == kind:
            end = min(end, report.error + 1 + more)
        return "\n".join(lines[report.start : end]).rstrip()
    # The name of the error is unknown or doesn't appear. The last traceback is the best guess,
    # unless much was written after it.
    guessed = [index for index, report in enumerate(reports) if not report.is_aside]
    if guessed and starts[guessed[-1] + 1] - reports[guessed[-1]].error <= _MOST_LINES:
        return "\n".join(lines[reports[guessed[-1]].start : starts[guessed[-1] + 1]]).rstrip()
    return "\n".join(lines[-_MOST_LINES:])


def extract_error_lines(words: str) -> list[str]:
    """Lines of last words that name the error, with its message; none without a traceback."""
    lines = words.splitlines()
    reports = [*_find_reports(lines)]
    return lines[reports[-1].error :] if reports else []


def _find_reports(lines: Sequence[str]) -> Iterator[_ErrorReport]:
    """Find the reports of errors, in order."""
    open_report: _ErrorReport | None = None
    index = 0
    while index < len(lines):
        if not lines[index].startswith((TRACEBACK_LINE, _GROUP_TRACEBACK_LINE, _GROUP_PREFIX)):
            index += 1
            continue
        start, error, end = index, *_find_traceback_end(lines, index)
        error_name = _ERROR_PATTERN.match(lines[error]) if error < len(lines) else None
        kinds = () if error_name is None else (error_name[1],)
        # A traceback that is chained to the one before belongs to the same report.
        if open_report is not None and any(
            line.startswith(CHAINED_PREFIXES) for line in lines[open_report.error + 1 : start]
        ):
            open_report = _ErrorReport(
                open_report.start, end, (*open_report.kinds, *kinds), open_report.is_aside
            )
        else:
            if open_report is not None:
                yield open_report
            aside = start > 0 and _ASIDE_PATTERN.match(lines[start - 1]) is not None
            open_report = _ErrorReport(start - aside, end, kinds, aside)
        index = end + 1
    if open_report is not None:
        yield open_report


def _find_traceback_end(lines: Sequence[str], start: int) -> tuple[int, int]:
    """Find the end of the traceback that starts at this line.

    Returns:
        The index of the line that names its error, and of the last line known to be part of it.
    """
    # In an exception group all lines are indented. The first line with text directly behind the
    # "  | " names the error.
    if not lines[start].startswith(TRACEBACK_LINE):
        stop = next(
            (
                index
                for index in range(start + 1, len(lines))
                if lines[index].startswith((TRACEBACK_LINE, _GROUP_TRACEBACK_LINE))
            ),
            len(lines),
        )
        error = next(
            (index for index in range(start, stop) if re.match(r"  \| \S", lines[index])), stop
        )
        return error, max(
            (index for index in range(error, stop) if _GROUP_END_PATTERN.match(lines[index])),
            default=stop - 1,
        )
    error = next(
        (index for index in range(start + 1, len(lines)) if not lines[index].startswith(" ")),
        len(lines),
    )
    return error, error
