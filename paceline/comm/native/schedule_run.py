"""An all-reduce by a schedule that C runs over the connections of a group.

Python begins it and waits for its end. In between the threads of the mesh send, receive and add:
see native/schedule.c.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from paceline.comm.native.schedule_steps import RankSteps
from paceline.comm.p2p.socket_mesh import SocketMesh
from paceline.comm.shm.shared_reductions import DTYPES, OPERATIONS
from paceline.errors import ResourceError
from paceline.native.functions import address_of, load_functions

# States: native/schedule.h.
RUNNING, ENDED, LINK_LOST, WRONG_BYTES = range(4)
SHORT = 256 << 10  # bytes of a tensor for which the mesh's thread isn't woken


class RunFailure(NamedTuple):
    """Why a run has failed: a link, and the bytes of a message if they are not those wanted."""

    state: int
    link: int
    came: int
    wanted: int


class ScheduleRun:
    """An all-reduce under way: a `TorchWait`.

    It keeps the tensor alive. Whoever starts it keeps the run itself until it has ended well, or
    the mesh is closed: until then C may write to the tensor.

    Args:
        mesh: The connections.
        number: Number of the run, the same on all ranks, and used once.
        steps: The steps of this rank.
        tensor: Contiguous, in the CPU's memory; it is reduced in place.
        op: Operation of the sums.
        describe_failure: Called with the failure. It says what has happened.
    """

    def __init__(
        self,
        mesh: SocketMesh,
        number: int,
        steps: RankSteps,
        tensor: Tensor,
        op: str,
        *,
        describe_failure: Callable[[RunFailure], str],
    ) -> None:
        self._tensor, self._describe_failure = tensor, describe_failure
        self._native = load_functions()
        nbytes = tensor.numel() * tensor.element_size()
        # A rank of which others need sums goes on although it doesn't wait.
        in_background = steps.rounds > 1 or nbytes > SHORT
        reduction = (ctypes.c_int64 * 5)(
            number,
            tensor.element_size(),
            DTYPES[tensor.dtype],
            OPERATIONS[op],
            in_background,
        )
        self._address = self._native.schedule_begin(
            mesh.address,
            address_of(steps.array),
            steps.n_steps,
            address_of(reduction),
            tensor.data_ptr(),
        )
        if not self._address:
            raise ResourceError("there is no memory for an all-reduce")
        finalizer = weakref.finalize(self, _free_run, self._address, os.getpid(), mesh)
        finalizer.atexit = False  # threads may still wait

    @property
    def has_ended_well(self) -> bool:
        """Whether the result is there, and C touches the tensor no more."""
        return int(self._native.schedule_state(self._address)) == ENDED

    def wait_within(self, seconds: float) -> bool:
        """Wait at most `seconds`; whether it has ended then. `RuntimeError` if it has failed."""
        state = int(self._native.schedule_wait(self._address, int(seconds * 1e9)))
        if state > ENDED:
            # C's structure `pl_progress`.
            facts = (ctypes.c_int64 * 4)()
            self._native.schedule_progress(self._address, address_of(facts))
            raise RuntimeError(self._describe_failure(RunFailure(*facts)))
        return state == ENDED

    def is_ready(self) -> bool:
        """Whether `wait_within` would return or raise at once."""
        return int(self._native.schedule_poll(self._address)) != RUNNING


def _free_run(address: int, process: int, mesh: SocketMesh) -> None:
    # A fork has none of the threads that may hold locks of the run. The mesh outlives its runs.
    del mesh
    if os.getpid() == process:
        load_functions().schedule_free(address)
