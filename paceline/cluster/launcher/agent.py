"""A launcher in a process of its own, for a caller that has other work: a notebook's kernel, say.

kernel --- a request as JSON, descriptors ---> agent --- launcher.launch ---> workers
       --- SIGHUP when the kernel ends ------>

The kernel may have threads and handle signals as it likes; a launcher forks, and handles signals
itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict

from paceline.cluster.launcher import launch, output
from paceline.cluster.launcher.request import LaunchRequest

# asks an agent to end its workers and itself: within seconds; a second one at once
END = signal.SIGHUP
_PR_SET_PDEATHSIG = 1


def command(job: LaunchRequest, parent: int) -> list[str]:
    """Return the command that starts an agent for this process, its parent.

    The agent inherits what `job.call` names.
    """
    return [
        sys.executable,
        "-P",
        "-m",
        "paceline.cluster.launcher.agent",
        str(parent),
        json.dumps(asdict(job)),
    ]


def read(text: str) -> LaunchRequest:
    """Read the request that `command` has written."""
    fields = json.loads(text)
    call = fields["call"]
    return LaunchRequest(
        **{**fields, "args": tuple(fields["args"]), "call": None if call is None else tuple(call)}
    )


def main(arguments: list[str]) -> int:
    """Run a job for the process with this number; the exit code is that of `launch.run`."""
    parent, text = arguments
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, END, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before the line above
        return 128 + END
    output.stand_in()
    return launch.run(read(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
