"""Replaces Gloo by the backend `paceline`, in this process and in its multiprocessing children."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster import secret as secrets
from paceline.cluster.discover import discover_place
from paceline.errors import PlaceError
from paceline.session.registration import NAME, register

SECRET = "PACELINE_SECRET_FD"
PLACE_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCHERS = frozenset(
    {"torchrun", "accelerate", "torch.distributed.run", "accelerate.commands.launch"}
)


def replace_gloo() -> None:
    """Give a group of this backend to callers of torch.distributed that ask for Gloo.

    Without a GPU, callers that name no backend get it too.
    """
    register()
    torch_distributed = dist.distributed_c10d
    # the helper is private in torch; if it is renamed, this line raises AttributeError
    make, barrier = torch_distributed._new_process_group_helper, torch_distributed.monitored_barrier

    def make_ours(
        group_size: int,
        group_rank: int,
        global_ranks: Any,
        backend: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        backend_name = str(backend).lower()
        ours = backend_name in ("gloo", "cpu:gloo") or (
            backend_name in ("undefined", "none", "cpu:gloo,cuda:nccl")
            and not torch.cuda.is_available()
        )
        chosen = dist.Backend(NAME) if ours else backend
        return make(group_size, group_rank, global_ranks, chosen, *args, **options)

    def wait_for_all(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; torch's own function accepts only groups of Gloo."""
        # imported here, so that children without groups don't import it
        from paceline.comm.backend.process_group import GroupBackend

        waiting = dist.group.WORLD if group is None else group
        if isinstance(waiting, GroupBackend):
            waiting.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        else:
            barrier(group, timeout, wait_all_ranks)

    torch_distributed._new_process_group_helper = make_ours  # type: ignore[assignment]
    torch_distributed.monitored_barrier = dist.monitored_barrier = wait_for_all
    _replace_in_children()


def _replace_in_children() -> None:
    """Make spawned processes of multiprocessing replace Gloo, too, before they read the script.

    multiprocessing first sends them a dict. They unpickle all of it, and ignore unknown keys.
    """
    prepare = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**prepare(name), NAME: _PickledReplacement()}


class _PickledReplacement:
    """Replaces Gloo in the process that unpickles it."""

    def __reduce__(self) -> Any:
        # a spawned child doesn't inherit the descriptor, so the secret itself is sent
        descriptor = os.environ.get(SECRET)
        return _replace_in_child, (
            None if descriptor is None else secrets.read_secret_descriptor(int(descriptor)),
        )


def _replace_in_child(secret: bytes | None) -> None:
    if secret is not None:
        os.environ[SECRET] = str(secrets.write_secret_descriptor(secret))
    replace_gloo()


def set_torch_variables() -> None:
    """Set the variables that `init_method="env://"` reads, if Slurm or MPI started this process.

    torchrun sets the same variables.
    """
    try:
        place = discover_place()
    except PlaceError:
        return  # the script may set its rank and size itself
    if place.launcher in ("alone", "paceline", "torchrun"):
        return
    host, port = place.meeting or ("127.0.0.1", 0)
    ranks = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": place.size,
        "LOCAL_WORLD_SIZE": place.local_size,
    }
    os.environ.update(
        {
            name: str(value)
            for name, value in (ranks | {"MASTER_ADDR": host, "MASTER_PORT": port}).items()
        }
    )


def use_cpu_in_accelerate() -> None:
    """Tell Accelerate, and with it transformers, to use the CPU if there is no GPU.

    Otherwise each of their processes takes itself for the only one.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def announce_programs() -> None:
    """Print one line when the script starts workers that are programs of their own.

    multiprocessing hands the replacement on to its children. A program that is started by its name
    begins without it, and its groups are Gloo's.
    """
    announced: list[str] = []

    def hear(event: str, details: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen" or announced:
            return
        _, command, _, environment = details
        if is_worker_program(command, environment):
            announced.append(" ".join(map(os.fsdecode, command)))
            print(
                "paceline: this script starts workers as programs of their own, and they get Gloo: "
                f"{announced[0]}; let paceline run start the workers (--workers N), or put "
                "`-m paceline.backend` before the script's name in that command",
                file=sys.stderr,
                flush=True,
            )

    # A hook can't be removed, so it belongs to a process that runs a script and nothing else.
    sys.addaudithook(hear)


def is_worker_program(command: Any, environment: Mapping[str, str] | None) -> bool:
    """Tell whether a command starts workers that don't have this backend.

    It does if it is a launcher of workers, or Python with another place than that of this process.
    """
    if not isinstance(command, list | tuple) or not command:
        return False
    words = [os.fsdecode(word) for word in command]
    if "paceline.backend" in words:
        return False
    names = {Path(words[0]).name, *words[1:3]}
    if names & LAUNCHERS:
        return True
    if environment is None or not Path(words[0]).name.startswith("python"):
        return False
    return any(environment.get(name) != os.environ.get(name) for name in PLACE_VARIABLES)
