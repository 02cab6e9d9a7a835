"""Hints to the user where nothing is wrong: that a job may not be what was meant, and which
hosts it waits for.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paceline.errors import UsageError
from paceline.formatting import counted
from paceline.timings import DEFAULTS, RendezvousTimings

# Those of `paceline run` that make a job of several workers: after the script they are the
# script's, and it runs alone.
SEVERAL = (
    "-n",
    "--workers",
    "--hosts",
    "--join",
    "--host-rank",
    "--secret-file",
    "--min-workers",
    "--restarts",
    "--servers",
    "--sync",
    "--backend",
    "--mesh",
    "--cut",
    "--straggler",
    "--cluster",
    "--report-to",
    "--shares",
)
_LONGEST_SCRIPT = 1 << 20  # bytes that are read of it


def misplaced(script: str, args: Sequence[str]) -> str | None:
    """Return a hint that a script's arguments look like options of `paceline run`; None if the
    script knows them itself.
    """
    for place, word in enumerate(args):
        if word == "--":
            break
        option = next(
            (
                option
                for option in SEVERAL
                if re.fullmatch(rf"{option}(=.*)?" if option != "-n" else r"-n\d*", word)
            ),
            None,
        )
        if option is None or _mentions(Path(script), option):
            continue
        given = shlex.join([word, *args[place + 1 : place + 2]] if word == option else [word])
        name, before = Path(script).name, f"paceline run {given} {script}"
        return (
            f"{given} after {name} goes to {name}, which runs on 1 worker; "
            f"if paceline is meant, put it before: {before}"
        )
    return None


def _mentions(script: Path, option: str) -> bool:
    """Whether a script has this option in quotes."""
    try:
        with script.open("rb") as file:
            return (
                re.search(rb"""['"]%s['"]""" % option.encode(), file.read(_LONGEST_SCRIPT))
                is not None
            )
    except OSError:
        return False


def starting(script: str, workers: int, join: str | None) -> str:
    """Say what is being started, as the first word of it may take a while."""
    return (
        f"starting {counted(workers, 'worker')} of "
        f"{Path(script).name}{'' if join is None else f', with those of other hosts by {join}'}"
    )


def joined(workers: Sequence[int], ranks: Sequence[int]) -> str:
    """Say that hosts with so many workers each have met; those of this one have these ranks."""
    mine = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return (
        f"joined {counted(len(workers) - 1, 'other host')}: {counted(sum(workers), 'worker')} in "
        f"all, {mine} of them here"
    )


def leftover(script: str, args: Sequence[str]) -> str:
    """Return a hint on a script that isn't there, where it is Python itself, as in `python
    train.py`.
    """
    if not args or re.fullmatch(r"(.*/)?python[\d.]*", script) is None:
        return ""
    return (
        f": paceline starts Python itself, so leave {script} out: "
        f"{shlex.join(['paceline', 'run', '...', *args])}"
    )


def crowded(workers: int, cores: int, host: str) -> str | None:
    """Return a hint on so many workers on a host with so many cores."""
    if workers <= cores:
        return None
    have = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"{workers} workers take turns on the {have} of {host}: more workers than cores make no "
        "step faster (GPUs aside)"
    )


def line(script: str, args: Sequence[str], options: Mapping[str, object]) -> str:
    """Write the command of a job; options that are None are left out, as their defaults are."""
    given = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["paceline", "run", *given, script, *args])


def no_terminal(*args: object, **named: object) -> NoReturn:
    """Say what to do in the place of `breakpoint()`, which calls this in workers."""
    raise UsageError(
        "breakpoint() needs a terminal, and workers have none: run the script alone, `python ...`, "
        "as one worker, or name a debugger that "
        "is reached in another way, such as PYTHONBREAKPOINT=remote_pdb.set_trace "
        "(PYTHONBREAKPOINT=0 goes past it)"
    )


class WaitReminder:
    """Reminds the user of a wait: after a second, and now and then."""

    def __init__(
        self, say: Callable[[str], None], *, timings: RendezvousTimings = DEFAULTS.rendezvous
    ) -> None:
        self._say, self._pause = say, timings.next_reminder
        self._next = time.monotonic() + timings.reminder

    def turn(self, text: Callable[[], str]) -> None:
        """Show `text` if it is time to; call it often."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._pause
            self._say(text())
