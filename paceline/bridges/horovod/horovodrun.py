"""`horovodrun`, on paceline's launcher.

    horovodrun -np 4 python train.py               paceline run --horovod --workers 4 train.py

With several hosts the command is given on each of them, as `paceline run` is: it logs in nowhere.
Options that can't be honoured are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paceline.bridges.horovod.common.place import call_as_horovod
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher.launch import USAGE_EXIT_CODE, run_job
from paceline.cluster.launcher.output import print_message
from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import UsageError
from paceline.notebook.launch import launch


def main() -> None:
    """Run the command."""
    try:
        request = make_request(sys.argv[1:])
    except UsageError as error:
        print_message(str(error))
        raise SystemExit(USAGE_EXIT_CODE) from None
    raise SystemExit(run_job(request, copy_environment()))


def make_request(arguments: Sequence[str]) -> LaunchRequest:
    """Make a request of the launcher from the arguments of `horovodrun`.

    Raises:
        UsageError: An option or a command can't be honoured.
    """
    parser = argparse.ArgumentParser(prog="horovodrun", description=__doc__, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", type=int, help="Processes on this host.")
    parser.add_argument("-H", "--hosts", help="HOST:SLOTS. Only this host.")
    parser.add_argument("--min-np", "--min-num-proc", type=int, help="Go on with as many.")
    parser.add_argument("--max-np", "--max-num-proc", type=int, help="At most as many: -np.")
    parser.add_argument("--reset-limit", type=int, help="Processes started again at most.")
    parser.add_argument("--start-timeout", type=float, help="Seconds to wait for each other.")
    parser.add_argument("--gloo", action="store_true", help="As it is: without MPI.")
    parser.add_argument("--verbose", action="store_true", help="As it is: messages are shown.")
    options, command = _split_command(parser, arguments)
    if options.hosts is not None:
        _check_hosts(options.hosts, options.num_proc)
    if options.num_proc is None:
        raise UsageError("horovodrun needs -np N, the number of processes")
    if options.max_np not in (None, options.num_proc):
        raise UsageError(
            f"--max-np {options.max_np} can't be honoured: a host starts -np {options.num_proc} "
            "processes; others join with `paceline run --horovod --join`"
        )
    script, *args = command
    return LaunchRequest(
        script=script,
        args=tuple(args),
        workers=options.num_proc,
        min_workers=options.min_np,
        restarts=options.reset_limit or 0,
        deadline=options.start_timeout,
        horovod=True,
    )


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    min_num_proc: int | None = None,
    reset_limit: int | None = None,
    **others: Any,
) -> list[Any]:
    """Call a function in several processes of this host, and return the results by rank.

    Args:
        func: The function. `import horovod.torch as hvd` in it finds the bridge.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: Number of processes. Default: 1.
        np: Older name of `num_proc`.
        min_num_proc: Number of processes with which it goes on when others die.
        reset_limit: Number of processes that are started again. Default: 0.
        others: Other options of Horovod's: refused, unless they are None.

    Raises:
        UsageError: An option can't be honoured.
        WorkerFailed: A process failed.
    """
    if refused := sorted(name for name, value in others.items() if value is not None):
        raise UsageError(
            f"horovod.run({refused[0]}=...) can't be honoured: processes start on this host, "
            "through paceline's launcher"
        )
    return launch(
        call_as_horovod,
        func,
        tuple(args),
        kwargs or {},
        workers=num_proc if np is None else np,
        min_workers=min_num_proc,
        restarts=reset_limit or 0,
    )


def _split_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split options from the command behind them, without its `python`."""
    flags = {"--gloo", "--verbose", "-h", "--help"}
    index = 0
    while index < len(arguments) and arguments[index].startswith("-"):
        alone = arguments[index] in flags or "=" in arguments[index]
        index += 1 if alone else 2
    options, unknown = parser.parse_known_args(arguments[:index])
    if unknown:
        raise UsageError(
            f"horovodrun {unknown[0]} can't be honoured by paceline; see `horovodrun --help`, and "
            "`paceline run --help` for what its launcher has"
        )
    command = [*arguments[index:]]
    if command and command[0].rpartition("/")[2].startswith("python"):
        del command[0]
    if not command or command[0].startswith("-"):
        raise UsageError("horovodrun needs a Python script: horovodrun -np 2 python train.py")
    return options, command


def _check_hosts(hosts: str, count: int | None) -> None:
    """Raise `UsageError` unless the only host is this one, with slots enough."""
    name, _, slots = hosts.partition(":")
    if "," in hosts or name not in ("localhost", "127.0.0.1"):
        raise UsageError(
            f"-H {hosts} can't be honoured: horovodrun logs in to hosts, and paceline doesn't; "
            "give `paceline run --horovod --hosts N --join HOST:PORT script.py` on each host"
        )
    if slots and count is not None and int(slots) < count:
        raise UsageError(f"-H {hosts} has fewer slots than -np {count}")
