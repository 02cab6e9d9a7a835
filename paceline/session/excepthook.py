"""Shows an uncaught error of paceline, or Ctrl-C, briefly: lines of the user's script, a message.

Lines of paceline and torch between them don't help a user; `python -X dev` shows them.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from paceline import callsite
from paceline.errors import PacelineError

BRIEF_ERRORS = (
    PacelineError,
    KeyboardInterrupt,
)  # it says little where in our waits an interrupt came

P = ParamSpec("P")
T = TypeVar("T")


def show_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception on stderr, as `sys.excepthook` does."""
    if isinstance(error, BRIEF_ERRORS) and not sys.flags.dev_mode and sys.stderr is not None:
        print(format_briefly(error, trace), end="", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def format_briefly(error: BaseException, trace: TracebackType | None) -> str:
    """Format the traceback of an error with the user's own lines alone."""
    report = traceback.TracebackException(type(error), error, trace, compact=True)
    _shorten_report(report)
    return "".join(report.format())


def _shorten_report(report: traceback.TracebackException) -> None:
    own_frames = [frame for frame in report.stack if not callsite.is_library_file(frame.filename)]
    for part in (report.__cause__, report.__context__):
        if part is not None:
            _shorten_report(part)
    if not _is_script_error(report.__cause__):
        report.__cause__ = None
    if not _is_script_error(report.__context__):
        report.__context__ = None
    if own_frames:
        report.stack = traceback.StackSummary.from_list(own_frames)


def _is_script_error(report: traceback.TracebackException | None) -> bool:
    """Whether an error of the script's own code explains the error of paceline after it."""
    return report is not None and any(
        callsite.is_user_file(frame.filename) for frame in report.stack
    )


def install_excepthook() -> None:
    """Show uncaught errors briefly from now on, unless another exception hook is set."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show_exception


def show_errors_briefly(function: Callable[P, T]) -> Callable[P, T]:
    """Show paceline's errors briefly if they leave `function`. A decorator."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BRIEF_ERRORS:
            install_excepthook()
            raise

    return wrapper
