"""Refuses, in one line each, what Accelerate can do and this bridge can't."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError

PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "torch_tp_plugin": "tensor parallelism of Accelerate",
    "megatron_lm_plugin": "Megatron-LM",
    "parallelism_config": "ParallelismConfig",
}
SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "ParallelismConfig",
}
HANDLERS = {
    "DistributedDataParallelKwargs": "there is no DDP here; give sync=, such as sync='AllReduce()'",
    "InitProcessGroupKwargs": "the run makes the process group; give deadline= for a time limit",
    "FP8RecipeKwargs": "FP8 is not supported; use mixed_precision='bf16'",
    "TERecipeKwargs": "FP8 is not supported; use mixed_precision='bf16'",
    "AORecipeKwargs": "FP8 is not supported; use mixed_precision='bf16'",
    "MSAMPRecipeKwargs": "FP8 is not supported; use mixed_precision='bf16'",
}
INSTEAD = "leave it out, or use accelerate.Accelerator under `paceline run --backend paceline`"


def check_options(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` for options of `Accelerator` that can't be honoured.

    Args:
        options: Keyword arguments of `Accelerator`.
        environ: The environment, in which `accelerate launch` switches plugins on.
    """
    for name, what in PLUGINS.items():
        if options.get(name) is not None:
            raise UsageError(
                f"{name}: paceline replicates models itself, without {what}: {INSTEAD}"
            )
    for name, what in SWITCHES.items():
        if environ.get(name, "false").lower() == "true":
            raise UsageError(
                f"{name} is set, and paceline replicates models itself, without {what}: unset it"
            )
    precision = options.get("mixed_precision") or environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if str(precision) == "fp8":
        raise UsageError("mixed_precision='fp8' is not supported: use 'bf16' or 'no'")
    for handler in options.get("kwargs_handlers") or ():
        if (why := HANDLERS.get(type(handler).__name__)) is not None:
            raise UsageError(f"kwargs_handlers has {type(handler).__name__}: {why}")
    for name in ("dynamo_backend", "dynamo_plugin"):
        backend = getattr(options.get(name), "backend", options.get(name))
        if str(getattr(backend, "value", backend)).lower() not in ("none", "no"):
            raise UsageError(f"{name} is not supported: call torch.compile in the script")
    check_loader_options(options.get("dataloader_config"))


def check_loader_options(config: Any) -> None:
    """Raise `UsageError` for options of a `DataLoaderConfiguration` that can't be honoured."""
    if getattr(config, "dispatch_batches", None):
        raise UsageError(
            "dispatch_batches=True reads all data in the first process, and paceline's workers "
            "read their own shares: leave it out"
        )
    if getattr(config, "use_stateful_dataloader", False):
        raise UsageError(
            "use_stateful_dataloader=True needs loaders of torchdata: leave it out, as save_state "
            "keeps the position of each loader anyway"
        )


def check_run(parts: Any) -> None:
    """Raise `UsageError` for a run that can't be used below Accelerate (its `RunParts`)."""
    if parts.survival is not None:
        raise UsageError(
            "Accelerate keeps the number of processes for good, so no worker may be lost: leave "
            "out --min-workers, and use --restarts with save_state and load_state"
        )
    if parts.axes.cut_axes:
        raise UsageError(
            "Accelerate's processes are replicas of one model, so the workers lie along `data` "
            "alone: leave out --mesh and --cut"
        )
