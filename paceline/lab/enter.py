"""Enters a host of a lab, then becomes a command; runs as a script of its own.

    enter.py NAMESPACES CGROUPS COMMAND...

NAMESPACES is a list of `kind=path`. CGROUPS is a list of files to which the process writes its own
ID. Both lists are joined by commas; CGROUPS is `-` if it is empty. A user namespace, if there is
one, comes first, because it gives the right to enter the others.

This script uses the standard library only, so that it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_INHERITED = "/proc/self/fd/"
_FAILED = 126  # the exit status with which a shell reports a command that can't be run


def enter_host(namespaces: str, cgroups: str) -> None:
    """Move this process into these namespaces and control groups.

    The process must have a single thread. Its working directory stays the same.
    """
    library = ctypes.CDLL(None, use_errno=True)
    working_directory = os.getcwd()
    # All paths are those outside of the host, so they are used before any namespace is entered.
    for path in () if cgroups == "-" else cgroups.split(","):
        with open(path, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    paths = [entry.partition("=")[2] for entry in namespaces.split(",")]
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    # The command would inherit the descriptors that were passed in, so they are closed.
    for path in paths:
        if path.startswith(_INHERITED):
            os.close(int(path.removeprefix(_INHERITED)))
    for descriptor in descriptors:
        if library.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.close(descriptor)
    # Entering a mount namespace moves the process to its root directory.
    os.chdir(working_directory)


def main() -> None:
    """Enter the host given on the command line, then become the command."""
    namespaces, cgroups, *command = sys.argv[1:]
    try:
        enter_host(namespaces, cgroups)
        # Python ignores SIGPIPE and handles SIGINT; the command starts with the defaults.
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
