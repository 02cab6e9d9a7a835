"""Refuses unknown options, and suggests the right one.

Names that other libraries use for the same option lead to ours.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Final, ParamSpec, TypeVar

from paceline.errors import UsageError
from paceline.formatting import format_choices

P = ParamSpec("P")
T = TypeVar("T")

# our name: the names in Lightning, Fabric, Accelerate, DeepSpeed and torch
_OTHERS: Final = {
    "sync": ("strategy", "algorithm", "backend"),
    "device": ("accelerator", "device_type"),
    "name": ("run_name", "experiment", "experiment_name", "project_name"),
    "folder": (
        "output_dir",
        "log_dir",
        "logging_dir",
        "project_dir",
        "default_root_dir",
        "root",
        "dir",
    ),
    "deadline": ("timeout", "timeout_seconds"),
    "report_to": ("logger", "loggers", "log_with"),
    "mesh": ("device_mesh", "mesh_shape"),
    "seed": ("random_seed", "manual_seed"),
    "total_steps": ("max_steps", "num_training_steps"),
    "run.step(micro_batches=...)": (
        "accumulate",
        "accumulate_grad_batches",
        "gradient_accumulation_steps",
    ),
    "run.prepare(cut=...)": ("cut", "fsdp_plugin", "zero_stage"),
    "torch.autocast in the script": ("precision", "mixed_precision", "fp16", "bf16"),
    "paceline run --workers N": (
        "workers",
        "num_workers",
        "devices",
        "num_processes",
        "world_size",
        "nproc_per_node",
    ),
    "paceline run --hosts N": ("hosts", "num_nodes", "nnodes"),
}


def check_names(where: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raise `UsageError` if a given name is not among `names`."""
    possible = list(names)
    for name in given:
        if name not in possible:
            meant = next((ours for ours, others in _OTHERS.items() if name in others), None)
            # some suggestions are not options of any function, but a command or another call
            fits = meant is not None and (meant in possible or not meant.isidentifier())
            raise UsageError(
                f"{where} has no option {name}; "
                f"{f'did you mean {meant}?' if fits else format_choices(name, possible)}"
            )


def refuse_unknown_options(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to refuse options that it doesn't have."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        check_names(f"pl.{function.__name__}", kwargs, names)
        return function(*args, **kwargs)

    return wrapper
