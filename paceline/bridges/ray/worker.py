"""What the backend does in each worker of Ray: give it its place, and have its run saved.

on_start      set_up_worker    variables of torch.distributed and paceline; a pipe
train_func    pl.start()       finds its place from the variables, resumes, and listens to the pipe
on_shutdown   save_and_end     writes to the pipe, and waits until train_func has ended
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from paceline.cluster import network
from paceline.errors import UsageError


def find_meeting_point() -> tuple[str, int]:
    """Find an address of this worker that the others reach, and a free port there."""
    import ray.util

    address = str(ray.util.get_node_ip_address())
    with network.open_listener(address) as listener:
        return address, int(listener.getsockname()[1])


def set_up_worker(shared_variables: Mapping[str, str], hosts: int) -> None:
    """Set the variables from which `pl.start()` finds its place and options.

    Args:
        shared_variables: Variables that all workers have in common.
        hosts: Number of nodes.

    Raises:
        UsageError: Checkpoints can't be written to the storage of the trial.
    """
    import ray.train

    context = ray.train.get_context()
    # The earlier group of a worker's process, if any, has ended: its pipe isn't needed any more.
    for name in ("PACELINE_SAVE_REQUEST_FD", "PACELINE_SAVE_WRITE_FD"):
        if name in os.environ:
            os.close(int(os.environ.pop(name)))
    read_fd, write_fd = os.pipe()
    os.environ.update(
        {
            "RANK": str(context.get_world_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "GROUP_RANK": str(context.get_node_rank()),
            "GROUP_WORLD_SIZE": str(hosts),
            "PACELINE_FOLDER": find_storage_folder(),
            "PACELINE_SAVE_REQUEST_FD": str(read_fd),
            "PACELINE_SAVE_WRITE_FD": str(write_fd),
            "PACELINE_RESUME": "1",
            **shared_variables,
        }
    )


def find_storage_folder() -> str:
    """Find the folder of runs in the trial's storage, which all nodes have to see."""
    import ray.train

    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise UsageError(
            f"the storage of this trial is {storage.storage_fs_path} on a "
            f"{storage.storage_filesystem.type_name} file system, and paceline writes checkpoints "
            "into a folder: give RunConfig(storage_path=...) a folder that all nodes see"
        )
    return os.path.join(storage.experiment_fs_path, "paceline")


def save_and_end(seconds: float, look: float) -> bool:
    """Have the run save a checkpoint, and wait until train_func has ended.

    Reports to Ray that nobody will read any more are dropped, as train_func would wait for them.

    Args:
        seconds: How long to wait.
        look: Seconds between two checks.

    Returns:
        Whether it has ended within `seconds`.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    execution = get_train_context().execution_context
    os.write(int(os.environ["PACELINE_SAVE_WRITE_FD"]), b"x")
    deadline = time.monotonic() + seconds
    # Both are private in Ray: `Backend.on_shutdown` gives no other way to wait for train_func.
    while execution.training_thread_runner.is_running() and time.monotonic() < deadline:
        while not execution.result_queue.empty():
            execution.result_queue.get_nowait()
            execution.result_queue.task_done()
        time.sleep(look)
    return not execution.training_thread_runner.is_running()
