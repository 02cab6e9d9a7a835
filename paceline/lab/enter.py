"""Enters a host of a lab, then becomes a command: `enter.py NAMESPACES CGROUPS COMMAND...`, run as
a script of its own.

NAMESPACES are `kind=path` and CGROUPS files to write the process's number to, each list joined by
commas (`-` for none). A user namespace, if there is one, comes first: it gives the right to enter
the others. Standard library only, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_INHERITED = "/proc/self/fd/"
_FAILED = 126  # as a shell says that a command can't be run


def enter_host(namespaces: str, cgroups: str) -> None:
    """Move this process, which has one thread, into these namespaces and control groups; its
    folder stays the same.
    """
    library = ctypes.CDLL(None, use_errno=True)
    here = os.getcwd()
    for path in () if cgroups == "-" else cgroups.split(","):
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    paths = [entry.partition("=")[2] for entry in namespaces.split(",")]
    opened = [os.open(path, os.O_RDONLY) for path in paths]
    for path in paths:
        if path.startswith(_INHERITED):
            os.close(int(path.removeprefix(_INHERITED)))  # else the command would have it
    for descriptor in opened:
        if library.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(descriptor)
    os.chdir(here)


def main() -> None:
    """Enter, and become the command."""
    namespaces, cgroups, *command = sys.argv[1:]
    try:
        enter_host(namespaces, cgroups)
        # Python ignores or handles them; a command starts with the usual answer
        for signum in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"paceline: {command[0]} can't be started in this host ({error.strerror})",
            file=sys.stderr,
        )
        sys.exit(_FAILED)


if __name__ == "__main__":
    main()
