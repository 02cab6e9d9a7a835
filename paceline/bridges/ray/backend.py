"""The backend of Ray Train: it gives workers their places, and saves before a group is stopped.

Ray stops all workers when it resizes their group, and starts the new ones on train_func:

    2 workers   steps 1 ... 140 | on_shutdown: all save after step 140
    3 workers                   | on_start: new places; the run resumes, steps 141 ...
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.train._internal.worker_group import WorkerGroup as FormerWorkerGroup
from ray.train.backend import Backend, BackendConfig

from paceline.bridges.ray import worker
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.notation import parse_strategy
from paceline.timings import DEFAULT_TIMINGS

_TIMINGS = DEFAULT_TIMINGS.saving
_logger = logging.getLogger(__name__)


@dataclass
class PacelineConfig(BackendConfig):
    """Runs paceline in the workers of Ray Train.

    >>> TorchTrainer(train_func, torch_config=PacelineConfig(), scaling_config=ScalingConfig(2))

    The options are those of `pl.start` and `paceline run`, and replace those of the script.

    Args:
        sync: Strategy, as an object or as text. Default: that of the script.
        name: Name of the run in the trial's storage. Default: "train".
        mesh, cut, shares, straggler, report_to: As text, as `paceline run` takes them.
        grace_seconds: Seconds for a checkpoint before Ray stops the workers. Default: 30.
        backend: Set by TorchTrainer, and not used.

    Raises:
        UsageError: A strategy has no text, or `grace_seconds` isn't above 0.
    """

    sync: Any = None
    name: str = "train"
    mesh: str | None = None
    cut: str | None = None
    shares: str | None = None
    straggler: str | None = None
    report_to: str | None = None
    grace_seconds: float = _TIMINGS.grace
    backend: str | None = None

    def __post_init__(self) -> None:
        # Strategies reach the workers as text, which is checked here, in the driver.
        if self.sync is not None and not isinstance(self.sync, str):
            self.sync = format_as_call(self.sync)
        if self.sync is not None:
            parse_strategy(self.sync)
        if not self.grace_seconds > 0:
            raise UsageError(f"grace_seconds is {self.grace_seconds:g}: give seconds above 0")

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend."""
        return PacelineBackend

    def make_variables(self) -> dict[str, str]:
        """Make the variables by which the options reach `pl.start`."""
        options = {
            "SYNC": self.sync,
            "NAME": self.name,
            "MESH": self.mesh,
            "CUT": self.cut,
            "SHARES": self.shares,
            "STRAGGLER": self.straggler,
            "REPORT_TO": self.report_to,
        }
        return {f"PACELINE_{name}": text for name, text in options.items() if text is not None}


class PacelineBackend(Backend):
    """Gives the workers of a group their places, and has them save before the group is stopped."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Give each worker its place."""
        if isinstance(worker_group, FormerWorkerGroup):
            raise UsageError(
                "PacelineConfig needs Ray Train V2: leave RAY_TRAIN_V2_ENABLED as it is"
            )
        address, port = worker_group.execute_single(0, worker.find_meeting_point)
        hosts = len({each.metadata.node_id for each in worker_group.get_workers()})
        shared_variables = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "PACELINE_SECRET": secrets.token_hex(32),
            **backend_config.make_variables(),
        }
        ray.get(
            worker_group.execute_async(worker.set_up_worker, shared_variables, hosts),
            timeout=_TIMINGS.start,
        )

    def on_shutdown(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Have the run save a checkpoint, unless it has ended."""
        seconds = backend_config.grace_seconds
        answers = worker_group.execute_async(worker.save_and_end, seconds, _TIMINGS.look)
        try:
            ended = ray.get(answers, timeout=seconds + _TIMINGS.margin)
        except GetTimeoutError:
            ended = [False]
        except RayError:
            # A worker has died. The others end by themselves, and go on from the last checkpoint.
            return
        if not all(ended):
            _logger.warning(
                "paceline: train_func didn't end within %g s, so its last steps may be lost: "
                "PacelineConfig(grace_seconds=...) gives it more",
                seconds,
            )
