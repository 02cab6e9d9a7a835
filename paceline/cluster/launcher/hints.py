"""Hints for the user when nothing is wrong.

They tell that a job may not be what was meant, or which hosts it waits for.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from paceline.errors import UsageError
from paceline.formatting import format_count
from paceline.timings import DEFAULT_TIMINGS, RendezvousTimings

# Options of `paceline run` that make a job of several workers. Behind the script they belong to the
# script, which then runs alone.
SEVERAL_WORKERS_OPTIONS = (
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
    "--horovod",
    "--mesh",
    "--cut",
    "--straggler",
    "--cluster",
    "--report-to",
    "--shares",
)
_MOST_SCRIPT_BYTES = 1 << 20  # bytes of a script that are searched


def hint_misplaced_options(script: str, args: Sequence[str]) -> str | None:
    """Hint that arguments of a script look like options of `paceline run`.

    None if there are none, or if the script has these options itself.
    """
    for index, argument in enumerate(args):
        # Arguments after `--` can't be meant for paceline.
        if argument == "--":
            break
        option = next(
            (
                option
                for option in SEVERAL_WORKERS_OPTIONS
                if re.fullmatch(rf"{option}(=.*)?" if option != "-n" else r"-n\d*", argument)
            ),
            None,
        )
        if option is None or _mentions_option(Path(script), option):
            continue
        option_text = shlex.join(
            [argument, *args[index + 1 : index + 2]] if argument == option else [argument]
        )
        name, corrected_command = Path(script).name, f"paceline run {option_text} {script}"
        return (
            f"{option_text} after {name} goes to {name}, which runs on 1 worker; "
            f"if paceline is meant, put it before: {corrected_command}"
        )
    return None


def _mentions_option(script: Path, option: str) -> bool:
    """Whether a script has this option in quotes."""
    try:
        with script.open("rb") as file:
            return (
                re.search(rb"""['"]%s['"]""" % option.encode(), file.read(_MOST_SCRIPT_BYTES))
                is not None
            )
    except OSError:
        return False


def describe_start(script: str, workers: int, join: str | None) -> str:
    """Message that the job starts. Its first output may take a while."""
    return (
        f"starting {format_count(workers, 'worker')} of "
        f"{Path(script).name}{'' if join is None else f', with those of other hosts by {join}'}"
    )


def describe_meeting(workers: Sequence[int], ranks: Sequence[int]) -> str:
    """Message that the hosts have met.

    Args:
        workers: Number of workers of each host.
        ranks: Ranks of the workers of this host.
    """
    ranks_here = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return (
        f"joined {format_count(len(workers) - 1, 'other host')}: "
        f"{format_count(sum(workers), 'worker')} in "
        f"all, {ranks_here} of them here"
    )


def hint_python_script(script: str, args: Sequence[str]) -> str:
    """Hint if a script that doesn't exist is Python itself, as in `python train.py`; else ""."""
    if not args or re.fullmatch(r"(.*/)?python[\d.]*", script) is None:
        return ""
    return (
        f": paceline starts Python itself, so leave {script} out: "
        f"{shlex.join(['paceline', 'run', '...', *args])}"
    )


def hint_crowded_host(workers: int, cores: int, host: str) -> str | None:
    """Hint that a host has more workers than cores; None if it hasn't."""
    if workers <= cores:
        return None
    core_text = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"{workers} workers take turns on the {core_text} of {host}: more workers than cores make "
        "no step faster (GPUs aside)"
    )


def write_command_line(script: str, args: Sequence[str], options: Mapping[str, object]) -> str:
    """Write the command of a job. Options that are None have their defaults, and are left out."""
    option_words = list[str]()
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            option_words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            option_words += [f"--{option}", str(value)]
    return shlex.join(["paceline", "run", *option_words, script, *args])


def refuse_breakpoint(*args: object, **named: object) -> NoReturn:
    """Raise an error in place of `breakpoint()`, which calls this in workers."""
    raise UsageError(
        "breakpoint() needs a terminal, and workers have none: run the script alone, `python ...`, "
        "as one worker, or name a debugger that "
        "is reached in another way, such as PYTHONBREAKPOINT=remote_pdb.set_trace "
        "(PYTHONBREAKPOINT=0 goes past it)"
    )


class WaitReminder:
    """Reminds the user of a wait: the first time after a second, and then now and then."""

    def __init__(
        self, say: Callable[[str], None], *, timings: RendezvousTimings = DEFAULT_TIMINGS.rendezvous
    ) -> None:
        self._say, self._pause_seconds = say, timings.next_reminder
        self._next_at = time.monotonic() + timings.reminder

    def remind_if_due(self, text: Callable[[], str]) -> None:
        """Show the text if it is time. Call this often."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self._pause_seconds
            self._say(text())
