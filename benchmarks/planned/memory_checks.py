"""Validations of counted bytes: states of ZeRO, activations, and models of torchgpipe."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from benchmarks.planned.readers import read_rows
from benchmarks.planned.scores import Verdict
from paceline.planner.transformers.parallel_layout import ParallelLayout
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_memory import (
    StateBytes,
    count_activations,
    count_state_bytes,
)

SHARDING = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
# Torchgpipe's AmoebaNet (docs/benchmarks.rst, after GPipe's table 1): a parameter, its gradient and
# one moment, in single precision.
AMOEBANET_BYTES = StateBytes(4, 4, 4)
# Korthikanti et al. 2022, table 3: hidden, layers, heads, tensor, pipeline, chunks, micro-batch,
# batch.
FIGURE_MODELS = {
    "22B": (6144, 48, 64, 8, 1, 1, 4, 4),
    "175B": (12288, 96, 96, 8, 8, 3, 1, 64),
    "530B": (20480, 105, 128, 8, 35, 3, 1, 280),
    "1T": (25600, 128, 160, 8, 64, 1, 1, 512),
}


def check_states(path: Path) -> Iterator[Verdict]:
    """Compare bytes of states under ZeRO with the formula, and with printed figures."""
    exact, printed, rows = 0, 0, read_rows(path)
    for row in rows:
        parameters, n = int(float(row["params"])), int(row["dp"])
        nbytes = sum(count_state_bytes(parameters, n, SHARDING[row["stage"]]))
        formula = sum(
            Fraction(int(part.split("P")[0]), n if part.endswith("/N") else 1)
            for part in row["formula"].split("+")
        )
        exact += Fraction(nbytes) == formula * parameters
        # Printed figures are cut off, or rounded, at their last digit.
        digits = len(row["gb_per_device"].partition(".")[2])
        printed += abs(nbytes / 1e9 - float(row["gb_per_device"])) < 10**-digits
    for what, count in (("the formula", exact), ("printed figures", printed)):
        yield Verdict(
            path.stem,
            f"bytes equal to {what}",
            len(rows),
            f"{count} of {len(rows)}",
            bar="all",
            passed=count == len(rows),
        )


def check_figure(path: Path) -> Iterator[Verdict]:
    """Compare bytes of figure 1 of Korthikanti et al.: states of a device's layers, activations.

    The figures are derived ones, and count layers only: no embedding, no logits.
    """
    errors = []
    for row in read_rows(path):
        hidden, layers, heads, t, p, chunks, b, batch = FIGURE_MODELS[row["model"]]
        model = Transformer(hidden, layers, heads, 2048, 51200, batch)
        saved = "selective" in row["mode"]
        layout = ParallelLayout(
            tensor=t,
            pipeline=p,
            micro_batch=b,
            schedule="interleaved" if chunks > 1 else "1f1b",
            chunks=chunks,
            recompute="selective" if saved else "none",
            sequence_parallel=saved,
        )
        if row["quantity"] == "activations":
            nbytes = count_activations(model, layout)
        else:
            parameters = model.layer_parameters * layers / (t * p)
            nbytes = sum(count_state_bytes(parameters, 1, 0, StateBytes(gradients=4)))
        errors.append(abs(nbytes / 2**30 / float(row["gib_per_gpu"]) - 1))
    yield _judge_errors(path.stem, "largest error of bytes", errors)


def check_torchgpipe(path: Path) -> Iterator[Verdict]:
    """Compare bytes of torchgpipe's models, as far as the table has what they follow from.

    AmoebaNet's "total memory" is that of parameters and their states. U-Net's contains activations,
    and the table has neither batch nor sizes of images: only a lower bound can be said.
    """
    errors, bounds = [], []
    for row in read_rows(path):
        parameters = float(row["params"][:-1]) * {"M": 1e6, "B": 1e9}[row["params"][-1]]
        total = float(row["total_memory_gib"]) * 2**30
        if row["model"].startswith("AmoebaNet"):
            errors.append(
                abs(sum(count_state_bytes(parameters, 1, 0, AMOEBANET_BYTES)) / total - 1)
            )
        else:
            bounds.append(sum(count_state_bytes(parameters, 1, 0, StateBytes(4, 4, 0))) <= total)
    yield _judge_errors(path.stem, "AmoebaNet: largest error of bytes", errors)
    yield Verdict(
        path.stem,
        "U-Net: parameters and gradients are below the total (which can't be predicted)",
        len(bounds),
        f"{sum(bounds)} of {len(bounds)}",
    )


def _judge_errors(table: str, what: str, errors: list[float]) -> Verdict:
    """Judge the largest error by a bar of 10 %."""
    worst = max(errors)
    return Verdict(table, what, len(errors), f"{worst:.1%}", bar="10.0%", passed=worst <= 0.1)
