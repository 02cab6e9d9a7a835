"""What is compared with what, and where: peers, settings and models as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

# |w - reference| / |reference| after the warm-up steps, of peers that compute the mean gradient
EXACT = 1e-5
HALF = 1e-3  # the same, of gradients rounded to half precision
# the same after all steps, in terms of a lone worker's: what rounding may have come to where a net
# has kinks (ReLU, max)
ROUNDED = 0.1
PERIOD = 4  # steps between two averages of post-local SGD: timed steps are a multiple of it
WARM = 3  # steps before the timed ones
SLOW = 2.0  # seconds of a step from which fewer are tried for the bucket size
SIZES_MB = (1, 5, 10, 25, 50, 200)  # bucket sizes that DDP is tried with


@dataclass(frozen=True)
class Peer:
    """A program under its own launcher.

    `check` is how its weights are judged: exact, half, or near (see `checks.py`).
    """

    name: str
    title: str
    program: str
    launcher: str = "torchrun"
    environment: str | None = None  # None: the driver's own
    # {address} stands for the host's, {bucket} for the best bucket size
    arguments: tuple[str, ...] = ()
    check: str = "exact"
    package: str | None = None  # whose version is told
    note: str = ""
    only: str | None = None  # the only setting it runs in


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "none",
            "one process, whole batch",
            "run_none.py",
            "alone",
            note="one core, nothing to exchange",
        ),
        Peer("paceline", "paceline", "run_paceline.py", "paceline run"),
        Peer("ddp", "DDP, 25 MB buckets", "run_ddp.py"),
        Peer(
            "ddp-best",
            "DDP, best bucket size",
            "run_ddp.py",
            arguments=("--bucket-mb", "{bucket}"),
            note="the best of those tried here",
        ),
        Peer(
            "ddp-fp16", "DDP, fp16 hook", "run_ddp.py", arguments=("--hook", "fp16"), check="half"
        ),
        Peer(
            "ddp-powersgd",
            "DDP, PowerSGD hook",
            "run_ddp.py",
            arguments=("--hook", "powersgd"),
            check="near",
            note="rank 1",
        ),
        Peer(
            "ddp-powersgd-1",
            "DDP, PowerSGD hook, one bucket",
            "run_ddp.py",
            arguments=("--hook", "powersgd", "--bucket-mb", "1000"),
            check="near",
            note="rank 1, everything in one bucket",
        ),
        Peer(
            "post-local-sgd",
            "DDP, post-local SGD",
            "run_ddp.py",
            arguments=("--hook", "local"),
            check="near",
            note=f"parameters averaged every {PERIOD} steps",
        ),
        Peer(
            "accelerate",
            "Accelerate",
            "run_accelerate.py",
            environment="accelerate",
            package="accelerate",
        ),
        Peer(
            "accelerate-launch",
            "Accelerate, its launcher with --cpu",
            "run_accelerate.py",
            "accelerate launch",
            environment="accelerate",
            package="accelerate",
            only="one-host",
        ),
        Peer(
            "fabric",
            "Lightning Fabric",
            "run_fabric.py",
            environment="fabric",
            package="lightning-fabric",
        ),
        Peer(
            "deepspeed",
            "DeepSpeed, ZeRO-1",
            "run_deepspeed.py",
            environment="deepspeed",
            package="deepspeed",
        ),
        Peer(
            "horovod",
            "Horovod",
            "run_horovod.py",
            "horovodrun",
            environment="horovod",
            package="horovod",
            note="its own Gloo",
        ),
        Peer(
            "torchft",
            "torchft",
            "run_torchft.py",
            "torchft",
            "torchft",
            ("--address", "{address}"),
            package="torchft",
        ),
        Peer(
            "hivemind",
            "hivemind, averager",
            "run_hivemind.py",
            environment="hivemind",
            arguments=("--address", "{address}"),
            package="hivemind",
            note="gradients, every step",
        ),
        Peer(
            "mpi",
            "MPI by hand",
            "run_mpi.py",
            "mpirun",
            environment="mpi",
            package="mpi4py",
            note="one all-reduce after backward",
        ),
    )
}


@dataclass(frozen=True)
class Setting:
    """Hosts of a lab with links of one rate, or this machine (`bandwidth` None)."""

    name: str
    title: str
    hosts: int
    each: int  # workers of a host
    bandwidth: str | None = None
    rate: float = math.inf  # bits per second

    @property
    def workers(self) -> int:
        """The workers of all hosts."""
        return self.hosts * self.each


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("one-host", "one host, 2 workers", 1, 2),
        Setting("two-hosts-1g", "2 hosts x 2 workers, 1 Gbit/s", 2, 2, "1gbit", 1e9),
        Setting("ethernet-1g", "4 hosts x 1 worker, 1 Gbit/s", 4, 1, "1gbit", 1e9),
        Setting("two-hosts-10g", "2 hosts x 2 workers, 10 Gbit/s", 2, 2, "10gbit", 1e10),
        Setting("two-hosts-100m", "2 hosts x 2 workers, 100 Mbit/s", 2, 2, "100mbit", 1e8),
    )
}


@dataclass(frozen=True)
class Model:
    """What the driver has to know of a model; `seconds` of a worker's compute in a step on one
    core, roughly, to plan with.
    """

    name: str
    title: str
    megabytes: float  # of its parameters
    batch: int  # samples of a step for each worker, as programs/workload.py has it
    seconds: float


MODELS = {
    model.name: model
    for model in (
        Model("gpt-0.9m", "GPT, 0.9 M parameters", 3.5, 12, 0.035),
        Model("gpt-19m", "GPT, 19 M parameters", 76.4, 2, 0.2),
        Model("mlp-25m", "MLP, 25 M parameters", 101, 4, 0.06),
        Model("digits-cnn", "CNN on digits, 0.04 M parameters", 0.15, 16, 0.002),
    )
}


# What is measured unless something else is asked for: everything where it is cheap, else where
# links and models differ most.
TELLING_MOST = {
    "one-host": tuple(MODELS),
    "two-hosts-1g": tuple(MODELS),
    "ethernet-1g": ("gpt-19m", "mlp-25m"),
    "two-hosts-10g": ("gpt-19m",),
    "two-hosts-100m": ("gpt-0.9m",),
}


@dataclass(frozen=True)
class Cell:
    """A model in a setting, and the timed steps of each launch; every peer trains the same."""

    setting: Setting
    model: Model
    steps: int

    @property
    def name(self) -> str:
        """How records name it."""
        return f"{self.setting.name}/{self.model.name}"


def guess(setting: Setting, model: Model, cores: int) -> float:
    """Seconds of a step, roughly: the compute that doesn't fit on the cores at once, and a ring
    over the slowest link.
    """
    compute = model.seconds * max(1.0, setting.workers / cores)
    between = (
        2 * (setting.workers - 1) / setting.workers * model.megabytes * 8e6 / setting.rate
        if setting.bandwidth
        else 0.0
    )
    return compute + between + model.megabytes * 1e-3 + 0.002


def timed_steps(step: float, seconds: float) -> int:
    """How many steps of about `step` seconds fill `seconds`: a multiple of `PERIOD`, 4 to 100."""
    return min(100, max(PERIOD, round(seconds / step / PERIOD) * PERIOD))


def launch_seconds(cell: Cell, cores: int) -> float:
    """About how long one launch takes: starting Python and torch in every worker, then the
    steps.
    """
    return (
        _starting(cell, cores) + (WARM + cell.steps) * guess(cell.setting, cell.model, cores) * 1.3
    )


def trial(cell: Cell, cores: int) -> tuple[int, int]:
    """Steps to warm up and steps to time when the sizes of DDP's buckets are tried: few where
    they are slow.
    """
    return (1, 2) if guess(cell.setting, cell.model, cores) > SLOW else (3, 6)


def trial_seconds(cell: Cell, cores: int) -> float:
    """About how long that takes."""
    return (
        _starting(cell, cores)
        + len(SIZES_MB) * sum(trial(cell, cores)) * guess(cell.setting, cell.model, cores) * 1.3
    )


def _starting(cell: Cell, cores: int) -> float:
    return 4.0 + 4.0 * cell.setting.workers / cores
