"""Refuses, in one line each, what `TrainingArguments` can ask for and this bridge can't honour."""

from __future__ import annotations

from typing import Any

from paceline.errors import UsageError

REPLICAS = "paceline replicates models itself: leave it out, or use transformers.Trainer"
REFUSED = {
    "deepspeed": REPLICAS,
    "fsdp": REPLICAS,
    "parallelism_config": REPLICAS,
    "torch_compile": "call torch.compile on the model in the script",
    "auto_find_batch_size": "workers would end with different batch sizes: set the batch size",
    "use_cpu_offload": REPLICAS,
    "ddp_backend": "the run makes the process group: leave it out",
    "ddp_find_unused_parameters": "there is no DDP here, and unused parameters are no problem",
    "ddp_bucket_cap_mb": "there is no DDP here; say sync='AllReduce(...)'",
    "ddp_broadcast_buffers": "there is no DDP here; buffers are those of the first process",
    "ddp_static_graph": "there is no DDP here",
}


def check_arguments(arguments: Any) -> None:
    """Raise `UsageError` for arguments that can't be honoured.

    Args:
        arguments: The `TrainingArguments`.
    """
    for name, why in REFUSED.items():
        value = getattr(arguments, name, None)
        if value and not (name == "fsdp" and value in ([], "")):
            raise UsageError(f"TrainingArguments has {name}={value!r}: {why}")
    if getattr(arguments, "train_sampling_strategy", None) == "batch_rebalance":
        raise UsageError(
            "train_sampling_strategy='batch_rebalance' cuts the data by rank itself: "
            "use 'group_by_length' or 'random'"
        )
    if arguments.n_gpu > 1:
        raise UsageError(
            f"this process has {arguments.n_gpu} GPUs, and a worker has one: start the script by "
            "`paceline run`"
        )


def check_processes(arguments: Any, size: int) -> None:
    """Raise `UsageError` if `TrainingArguments` sees another number of processes than the run.

    Args:
        arguments: The `TrainingArguments`.
        size: Number of workers of the run.
    """
    if arguments.world_size != size:
        raise UsageError(
            f"TrainingArguments sees {arguments.world_size} processes, and the run has {size}: say "
            "TrainingArguments(use_cpu=True) on machines without a GPU, where transformers takes "
            "each process for the only one"
        )
