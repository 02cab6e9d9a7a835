"""A launcher in a process of its own, for callers that have other work, such as a notebook.

    kernel --- a request as JSON, descriptors ---> agent --- `launch.run_job` ---> workers
           --- SIGHUP when the kernel ends ------>

The kernel may have threads and signal handlers of its own. A launcher forks, and handles signals
itself, so it can't run in the same process.
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

# Signal that asks an agent to end its workers and itself within seconds. A second one ends them at
# once.
END_SIGNAL = signal.SIGHUP
_PR_SET_PDEATHSIG = 1


def make_command(job: LaunchRequest, parent: int) -> list[str]:
    """Make the command that starts an agent for the process `parent`.

    The agent inherits the descriptors of `job.call`.
    """
    return [
        sys.executable,
        "-P",
        "-m",
        "paceline.cluster.launcher.agent",
        str(parent),
        json.dumps(asdict(job)),
    ]


def read_request(text: str) -> LaunchRequest:
    """Read the request that `make_command` has written."""
    fields = json.loads(text)
    call = fields["call"]
    return LaunchRequest(
        **{**fields, "args": tuple(fields["args"]), "call": None if call is None else tuple(call)}
    )


def main(arguments: list[str]) -> int:
    """Run a job for the process with this number, and return the exit code of `launch.run_job`."""
    parent, text = arguments
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, END_SIGNAL, 0, 0, 0)
    # The parent may have ended before the line above, and then no signal would come.
    if os.getppid() != int(parent):
        return 128 + END_SIGNAL
    output.open_missing_streams()
    return launch.run_job(read_request(text))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
