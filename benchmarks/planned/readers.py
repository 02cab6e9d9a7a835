"""Reads tables of published measurements; what a table doesn't say stands here with its source."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planned.rows import (
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2023,
    OVERLAPPED,
    VTRAIN,
    MeasuredLayout,
    make_cluster,
)
from paceline.planner.transformers.device import DeviceCluster
from paceline.planner.transformers.parallel_layout import ParallelLayout, check_layout
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_cost import FrameworkTraits

Row = Mapping[str, str]

# Names that tables give to the same thing. The first that a table has is taken.
NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden", "hidden_size", "nhidden"),
    "layers": ("layers", "num_layers", "nlayers"),
    "heads": ("heads", "num_heads", "nheads"),
    "sequence": ("seq_len", "sequence", "seq", "sequence_length"),
    "vocabulary": ("vocab", "vocabulary", "vocab_size"),
    "tensor": ("tp", "tensor", "tp_size"),
    "pipeline": ("pp", "pipeline", "pp_size"),
    "data": ("dp", "data", "dp_size"),
    "devices": ("n_gpus", "gpus", "num_gpus", "n_devices"),
    "nodes": ("nodes", "n_nodes", "num_nodes"),
    "global_batch": ("global_batch", "global_batch_size", "gbs", "batch_size"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs"),
    "chunks": ("virtual_stages", "virtual_stages_per_device", "vpp", "interleave"),
    "kv_heads": ("kv_heads", "n_kv_heads", "query_groups"),
    "ffn": ("ffn", "ffn_hidden", "ffn_hidden_size", "ffn_dim"),
    "context": ("cp", "context_parallel"),
    "sharding": ("zero_stage", "sharding", "zero"),
    "model_parallel": ("model_parallel_size", "model_parallel", "mp"),
    "copy_batch": ("batch_per_dp", "batch_size_per_dp", "samples_per_dp"),
    "billions": ("params_b", "parameters_b", "size_b"),
}
# Shapes of known models, for tables that give only a size: hidden, layers, heads. SC21 table 1, and
# table 3 of Dubey et al. 2024 (Llama 3).
SHAPES: Mapping[str, tuple[int, int, int]] = {
    "22B": (6144, 48, 64),
    "145B": (12288, 80, 96),
    "175B": (12288, 96, 96),
    "310B": (16384, 96, 128),
    "405B": (16384, 126, 128),
    "530B": (20480, 105, 128),
    "1T": (25600, 128, 160),
}
LLAMA_FFN = {16384: 53248, 8192: 28672, 4096: 14336}  # by hidden size
SECONDS = (
    "iter_time_s",
    "derived_iter_time_s",
    "sec_per_it",
    "sec_per_iter",
    "seconds_per_iteration",
    "iteration_s",
    "iteration_time_s",
    "step_time_s",
    "iter_s",
    "seconds",
)
TFLOPS = ("tflops_per_gpu", "tflops", "achieved_tflops_per_gpu", "model_tflops_per_gpu")
SAMPLES = ("samples_per_s", "throughput_samples_per_s")
TOKENS = ("tokens_per_s", "throughput_tokens_per_s")
OUT_OF_MEMORY = re.compile(r"\boom\b|out.?of.?memory", re.IGNORECASE)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table. Names of columns are in lower case."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {str(key).strip().lower(): value for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def find_number(row: Row, names: Sequence[str]) -> float | None:
    """Find the first of several columns that has a number."""
    for name in names:
        try:
            return float((row.get(name) or "").replace(",", ""))
        except ValueError:
            continue
    return None


def read_vtrain(path: Path) -> list[MeasuredLayout]:
    """Read a table of vTrain.

    VIA-Research/vTrain@f8dda84: a vocabulary of 50257, of which each device has a part that is
    rounded down, and a matrix of its own for the logits (src/predictor.py); one node is a p4d with
    8 A100 of 40 GB, several nodes are A100 of 80 GB with 800 Gbit/s each. Configurations say that
    activations are computed again. Times of one node show nothing of it: those of one stage and of
    several fit one formula to the microsecond, with the same time of a layer.
    """
    measured = []
    for row in read_rows(path):
        t, gpus = int(row["tensor"]), int(row["gpus"])
        several = gpus > 8
        sequence = find_number(row, NAMES["sequence"]) or (2048 if several else 1024)
        model = Transformer(
            int(row["hidden"]), int(row["layers"]), int(row["heads"]), int(sequence),
            50257 // t * t, int(row["global_batch"]), tied=False,
        )  # fmt: skip
        layout = ParallelLayout(
            t,
            int(row["pipeline"]),
            int(row["data"]),
            int(row["micro_batch"]),
            recompute="full" if several else "none",
        )
        cluster = make_cluster("a100-80gb" if several else "a100-40gb", gpus, 8, 100e9)
        group = (row["hidden"], row["gpus"], row["global_batch"], row["layers"], str(sequence))
        measured.append(
            MeasuredLayout(
                layout.describe(), model, layout, cluster, MEGATRON_2021 if several else VTRAIN,
                float(row["iteration_ms"]) / 1e3, group,
            )
        )  # fmt: skip
    return measured


def read_layouts(path: Path) -> tuple[list[MeasuredLayout], list[str]]:
    """Read a table of layouts of any kind; also return why rows were left out.

    Columns may have the names of `NAMES`. A row without layers, hidden size, batch or time is left
    out, and so is one with context parallelism.
    """
    measured, left_out = [], []
    for number, row in enumerate(read_rows(path), 2):
        try:
            measured.append(_read_layout(path.name, row))
        except (ValueError, ZeroDivisionError) as error:
            left_out.append(f"{path.name}:{number}: {error}")
    return measured, left_out


def _read_layout(name: str, row: Row) -> MeasuredLayout:
    """Read a row. Raises `ValueError` if it can't be predicted."""
    text = " ".join(value for value in row.values() if isinstance(value, str))
    numbers = {key: find_number(row, names) for key, names in NAMES.items()}
    if (numbers["context"] or 1) > 1:
        raise ValueError("context parallelism isn't predicted")
    together = int(numbers["model_parallel"] or 1)
    tensor = int(numbers["tensor"] or min(together, 8))
    pipeline = int(numbers["pipeline"] or max(1, together // tensor))
    cluster = find_cluster(text, numbers, tensor * pipeline * int(numbers["data"] or 1))
    devices = int(numbers["devices"] or (numbers["nodes"] or 0) * cluster.devices_per_host)
    data = int(numbers["data"] or devices / (tensor * pipeline))
    if numbers["copy_batch"] and not numbers["global_batch"]:
        numbers["global_batch"] = numbers["copy_batch"] * data
    model = _read_model(numbers, text)
    layout = _make_layout(row, numbers, model, (tensor, pipeline, data), text)
    cluster = find_cluster(text, numbers, layout.devices)
    check_layout(model, layout)
    traits = find_traits(name, text)
    seconds = None if OUT_OF_MEMORY.search(text) else _find_seconds(row, model, layout, cluster)
    label = row.get("model") or row.get("params_b") or name
    who = row.get("system") or row.get("framework") or row.get("scheme") or ""
    group = (label, who, str(model.global_batch), str(layout.devices))
    return MeasuredLayout(f"{label} {who}".strip(), model, layout, cluster, traits, seconds, group)


def _read_model(numbers: Mapping[str, float | None], text: str) -> Transformer:
    """Read the transformer of a row. Raises `ValueError` if too little of it is known."""
    shape = (numbers["hidden"], numbers["layers"], numbers["heads"])
    if not all(shape):
        shape = _find_shape(numbers["billions"], text)
    if not numbers["global_batch"]:
        raise ValueError("no batch")
    llama = "llama" in text.lower()
    modern = llama or "flash" in text.lower() or "megascale" in text.lower()
    hidden, layers, heads = (int(value or 0) for value in shape)
    return Transformer(
        hidden,
        layers,
        heads,
        sequence=int(numbers["sequence"] or 2048),
        vocabulary=int(numbers["vocabulary"] or (128256 if llama else 51200)),
        global_batch=int(numbers["global_batch"]),
        ffn=int(numbers["ffn"] or (LLAMA_FFN.get(hidden, 0) if llama else 0)),
        kv_heads=int(numbers["kv_heads"] or (8 if llama else 0)),
        gated=llama,
        tied=not llama,
        attention="flash" if modern else "standard",
    )


def _find_shape(billions: float | None, text: str) -> tuple[int, int, int]:
    """Find the shape of a model by its size, or by its name."""
    for name, shape in SHAPES.items():
        size = float(name[:-1]) * {"B": 1, "T": 1000}[name[-1]]
        if billions and abs(billions / size - 1) < 0.01:
            return shape
        if not billions and re.search(rf"\b{name}\b", text, re.IGNORECASE):
            return shape
    raise ValueError("neither layers, hidden and heads nor the size of a known model")


def _make_layout(
    row: Row,
    numbers: Mapping[str, float | None],
    model: Transformer,
    sizes: tuple[int, int, int],
    text: str,
) -> ParallelLayout:
    tensor, pipeline, data = sizes
    chunks = int(numbers["chunks"] or 1) if pipeline > 1 else 1
    if pipeline > 1 and not numbers["chunks"] and "llama" in text.lower():
        # Llama 3 interleaves, with one layer less in the first and in the last stage (3.3.2).
        chunks = (model.layers + 2) // pipeline
    micro_batch = int(numbers["micro_batch"] or 1)
    recompute: Any = row.get("recompute") or row.get("activation_recompute") or ""
    if recompute not in ("none", "selective", "full"):
        # Before selective recomputation was known, large models computed whole layers again.
        recompute = "none" if model.attention == "flash" else "full"
    parallel = find_number(row, ("sequence_parallel",))
    sharding = numbers["sharding"]
    # Recent frameworks shard the optimizer's state.
    scheme = (row.get("scheme") or row.get("method") or row.get("system") or "").lower()
    if sharding is None and "zero" in scheme:
        found = re.search(r"zero-?\s*(\d)", scheme)
        sharding = float(found[1]) if found else 3.0
    return ParallelLayout(
        tensor,
        pipeline,
        data,
        micro_batch,
        "interleaved" if chunks > 1 else "1f1b",
        chunks,
        recompute,
        (bool(parallel) if parallel is not None else model.attention == "flash") and tensor > 1,
        int(sharding if sharding is not None else model.attention == "flash") if data > 1 else 0,
    )


def find_cluster(text: str, numbers: Mapping[str, float | None], devices: int) -> DeviceCluster:
    """Find the devices in the words of a row: `hardware`, or whatever names them."""
    lower = text.lower()
    if "h100" in lower or "llama 3" in lower:
        return make_cluster("h100-sxm", devices, 8, 400e9)
    if "v100" in lower:
        # Jean Zay, 4 V100 a node: 10.6 GB/s on 4 nodes, 6.8 GB/s on 16 (calib_allreduce).
        return make_cluster("v100-32gb", devices, 4, 8e9 / 0.6)
    return make_cluster("a100-40gb" if "40gb" in lower else "a100-80gb", devices)


def find_traits(name: str, text: str) -> FrameworkTraits:
    """Find the framework in the name of a table, and the words of a row."""
    lower = f"{name} {text}".lower()
    if "megascale" in lower and "megatron-lm" not in text.lower():
        return OVERLAPPED
    if "llama" in lower:
        return OVERLAPPED
    if "korthikanti" in lower:
        return MEGATRON_2022
    if "sc21" in lower or "2104.04473" in lower or "bigscience" in lower:
        return MEGATRON_2021
    return MEGATRON_2023


def _find_seconds(
    row: Row, model: Transformer, layout: ParallelLayout, cluster: DeviceCluster
) -> float:
    """Find the time of a step: seconds, or what a throughput means. Raises `ValueError`."""
    if seconds := find_number(row, SECONDS):
        return seconds
    if milliseconds := find_number(row, ("iteration_ms", "iter_ms")):
        return milliseconds / 1e3
    if samples := find_number(row, SAMPLES):
        return model.global_batch / samples
    if tokens := find_number(row, TOKENS):
        return model.global_batch * model.sequence / tokens
    if tflops := find_number(row, TFLOPS):
        # Counted with the recomputation (Narayanan et al. 2021, appendix).
        again = 4 / 3 if layout.recompute == "full" else 1.0
        return model.count_model_flops() * again / (layout.devices * tflops * 1e12)
    if share := find_number(row, ("mfu_pct", "mfu")):
        share = share / 100 if share > 1 else share
        return model.count_model_flops() / (layout.devices * share * cluster.device.peak_flops)
    raise ValueError("no time")
