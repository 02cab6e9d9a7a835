"""Validations of predicted seconds: layouts, layers, and the bubbles of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from benchmarks.planned.readers import read_rows
from benchmarks.planned.rows import MEGATRON_2022, MEGATRON_2023, MeasuredLayout, make_cluster
from benchmarks.planned.scores import (
    Verdict,
    chance_of_good_choice,
    group_rows,
    kendall_tau,
    mean_error,
    predict_trivially,
    rate_choices,
    rate_order,
)
from paceline.planner.transformers.device import DeviceCluster
from paceline.planner.transformers.layer_time import time_layer
from paceline.planner.transformers.parallel_layout import ParallelLayout, Recompute
from paceline.planner.transformers.stage_pipeline import StageSeconds, time_pipeline
from paceline.planner.transformers.transformer import Transformer, count_hidden_bytes
from paceline.planner.transformers.transformer_cost import price_layout
from paceline.planner.transformers.transformer_memory import count_device_memory

# The library's schedules; ZB-H2 and ZB-2p keep twice as many activations, and aren't among them.
ZERO_BUBBLE_NAMES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zero-bubble",
    "ZB-1p": "zero-bubble",
}
# The beginning of a table's name: the best published error, and the bars of ours and of tau.
# Bang et al. 2024, section 5, says 8.37 % on one node and 14.73 % on several.
BARS: Mapping[str, tuple[str, float, float | None]] = {
    "vtrain_single": ("8.4 % (vTrain)", 0.084, 0.85),
    "vtrain": ("14.7 % (vTrain)", 0.15, 0.7),
    "korthikanti2022_table5": ("3.7 % (Calculon)", 0.05, None),
    "megatron_sc21_table1": ("none published", 0.05, None),
    "": ("", 0.15, 0.7),
}


def check_layouts(table: str, rows: Sequence[MeasuredLayout]) -> Iterator[Verdict]:
    """Compare seconds, choices and order; and which rows run out of memory."""
    rival, bar, tau_bar = next(bars for name, bars in BARS.items() if table.startswith(name))
    scored = [row.predict() for row in rows]
    kept = [(row, one) for row, one in zip(rows, scored, strict=True) if row.seconds is not None]
    ran = [row for row, _ in kept]
    predicted, measured = [one.seconds for _, one in kept], [row.seconds or 0.0 for row in ran]
    if len(ran) > 1:
        error, trivial = mean_error(predicted, measured), predict_trivially(ran)
        yield Verdict(
            table,
            "mean error of seconds",
            len(ran),
            f"{error:.1%}",
            trivial=f"{mean_error(trivial, measured):.0%}",
            rival=rival,
            bar=f"{bar:.1%}",
            passed=error <= bar,
        )
    if tau_bar is not None and len(ran) > 2:
        yield from _check_order(table, group_rows(ran), predicted, measured, tau_bar)
    if lost := [one for row, one in zip(rows, scored, strict=True) if row.seconds is None]:
        named, wrong = sum(not one.fits for one in lost), sum(not one.fits for _, one in kept)
        yield Verdict(
            table,
            f"out-of-memory rows named ({wrong} of {len(kept)} that ran named, too)",
            len(lost),
            f"{named} of {len(lost)}",
            trivial="none",
            bar="all",
            passed=named == len(lost),
        )


def _check_order(
    table: str,
    groups: Sequence[Sequence[int]],
    predicted: Sequence[float],
    measured: Sequence[float],
    tau_bar: float,
) -> Iterator[Verdict]:
    """Compare the choice in each group, and the order in groups and of all rows."""
    alone = kendall_tau(predicted, measured)
    tau = rate_order(groups, predicted, measured) if groups else alone
    if groups:
        share = rate_choices(groups, predicted, measured)
        yield Verdict(
            table,
            "choice within 5 % of the best of its group",
            len(groups),
            f"{share:.0%}",
            trivial=f"{chance_of_good_choice(groups, measured):.0%} (by chance)",
            bar="90%",
            passed=share >= 0.9,
        )
    yield Verdict(
        table,
        "Kendall's tau in groups (of all rows)" if groups else "Kendall's tau of all rows",
        len(groups) or len(measured),
        f"{tau:.2f} ({alone:.2f})" if groups else f"{tau:.2f}",
        trivial="0.00",
        bar=f"{tau_bar:.2f}",
        passed=tau >= tau_bar,
    )


def check_layer(path: Path) -> Iterator[Verdict]:
    """Compare the milliseconds of one layer of a 22 B model, forward and backward."""
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    for row in read_rows(path):
        t, b, s = int(row["tp"]), int(row["micro_batch"]), int(row["seq_len"])
        model = Transformer(int(row["hidden"]), 48, int(row["heads"]), s, 51200, b)
        recompute: Recompute = "none"
        for word in get_args(Recompute):
            if row["experiment"].startswith((word, f"baseline with {word}")):
                recompute = word
        cluster = make_cluster("a100-80gb", 8)
        parallel = "sequence" in row["experiment"]
        layer = time_layer(
            model, cluster.device, t, b, sequence_parallel=parallel, recompute=recompute
        )
        one = cluster.time_all_reduce(count_hidden_bytes(model, b), t, 1)
        sums = 2.0 if parallel else 2 * (1 - MEGATRON_2022.overlap_tensor)
        sums += 2 if recompute == "full" else 0
        back = layer.input_seconds + layer.weight_seconds + sums * one
        errors["forward"].append(
            abs((layer.forward_seconds + 2 * one) * 1e3 / float(row["forward_ms"]) - 1)
        )
        errors["backward"].append(abs(back * 1e3 / float(row["backward_ms"]) - 1))
    for name, values in errors.items():
        error = sum(values) / len(values)
        yield Verdict(path.stem, f"mean error of a layer's {name}", len(values), f"{error:.1%}")


def check_bubbles(path: Path) -> Iterator[Verdict]:
    """Compare bubble rates of schedules, samples per second, and peaks of memory."""
    rates: dict[str, list[float]] = {}
    speeds: tuple[list[float], list[float]] = ([], [])
    peaks: tuple[list[float], list[float]] = ([], [])
    skipped = 0
    for row in read_rows(path):
        if row["schedule"] not in ZERO_BUBBLE_NAMES:
            skipped += 1
            continue
        model, cluster, layout = _read_pipeline(row)
        if row["bubble_rate"]:
            rate = _compute_bubble_rate(model, cluster, layout)
            rates.setdefault(row["schedule"], []).append(abs(rate - float(row["bubble_rate"])))
        if row["samples_per_gpu_per_s"]:
            step = price_layout(model, cluster, layout, MEGATRON_2023).seconds
            speeds[0].append(model.global_batch / step / layout.devices)
            speeds[1].append(float(row["samples_per_gpu_per_s"]))
        if row["peak_mem_gb"]:
            memory = count_device_memory(model, layout, MEGATRON_2023.states)
            peaks[0].append(memory.total / 2**30)
            peaks[1].append(float(row["peak_mem_gb"]))
    for schedule, values in rates.items():
        mean = sum(values) / len(values)
        yield Verdict(
            path.stem,
            f"bubble rate of {schedule}: mean difference",
            len(values),
            f"{mean:.3f}",
            bar="0.020",
            passed=mean <= 0.02,
        )
    error = mean_error(*speeds)
    yield Verdict(path.stem, "mean error of samples/s", len(speeds[0]), f"{error:.1%}")
    error = mean_error(*peaks)
    yield Verdict(
        path.stem,
        "mean error of a device's peak memory",
        len(peaks[0]),
        f"{error:.1%}",
        bar="10.0%",
        passed=error <= 0.1,
    )
    if skipped:
        yield Verdict(path.stem, "ZB-H2, ZB-2p: the library has no such schedule", skipped, "-")


def _read_pipeline(
    row: Mapping[str, str],
) -> tuple[Transformer, DeviceCluster, ParallelLayout]:
    """Read a row. The first and the last stage have a layer less than the others."""
    ranks, b = int(row["pp"]), int(row["micro_batch"])
    name = ZERO_BUBBLE_NAMES[row["schedule"]]
    model = Transformer(
        int(row["hidden"]),
        int(row["layers"]),
        int(row["heads"]),
        int(row["seq_len"]),
        50304,
        b * int(row["n_microbatches"]),
    )
    # With interleaving each stage is one layer.
    chunks = (model.layers + 2) // ranks if name == "interleaved" else 1
    cluster = make_cluster("a100-80gb", ranks, 8, 100e9)
    return model, cluster, ParallelLayout(1, ranks, 1, b, name, chunks)


def _compute_bubble_rate(
    model: Transformer, cluster: DeviceCluster, layout: ParallelLayout
) -> float:
    """Compute a bubble rate as the authors do: all stages take as long as one in the middle."""
    stages = layout.pipeline * layout.chunks
    each = (model.layers + 2) // stages
    layer = time_layer(
        model,
        cluster.device,
        1,
        layout.micro_batch,
        accumulation_bytes=MEGATRON_2023.accumulation_bytes,
    )
    nbytes = count_hidden_bytes(model, layout.micro_batch)
    times = StageSeconds(
        (layer.forward_seconds * each,) * stages,
        (layer.input_seconds * each,) * stages,
        (layer.weight_seconds * each,) * stages,
        MEGATRON_2023.message_seconds + cluster.time_send(nbytes, layout.pipeline, 1, 1),
    )
    n = layout.count_micro_batches(model)
    return time_pipeline(layout.schedule, layout.pipeline, n, layout.chunks, times)[1]
