"""The validations of the planner, one function for each kind of table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.planned.readers import read_layouts, read_rows, read_vtrain
from benchmarks.planned.rows import MEGATRON_2023, MeasuredLayout, make_cluster
from benchmarks.planned.scores import (
    Verdict,
    group_rows,
    kendall_tau,
    mean_error,
    predict_trivially,
    rate_choices,
    rate_memory,
    rate_order,
)
from paceline.plan.parallel_layout import ParallelLayout
from paceline.plan.stage_pipeline import StageSeconds, time_pipeline
from paceline.plan.transformer import Transformer, count_hidden_bytes
from paceline.plan.transformer_cost import price_layout, time_layer
from paceline.plan.transformer_memory import StateBytes, count_activations, count_state_bytes

# The library's schedules; ZB-H2 and ZB-2p keep twice as many activations, and aren't among them.
ZERO_BUBBLE_NAMES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zero-bubble",
    "ZB-1p": "zero-bubble",
}
# Torchgpipe's AmoebaNet (docs/benchmarks.rst, after GPipe's table 1): a parameter, its gradient and
# one moment, in single precision.
AMOEBANET_BYTES = StateBytes(4, 4, 4)
NOT_LAYOUTS = ("vtrain", "korthikanti2022_fig1", "korthikanti2022_table4", "zerobubble", "zero_table1",
           "torchgpipe", "calib_")  # fmt: skip


def check_folder(folder: Path) -> Iterator[Verdict]:
    """Check all tables of a folder."""
    for path, rows in read_folder(folder):
        if path.name.startswith("vtrain"):
            yield from check_vtrain(path.stem, rows)
        else:
            yield from check_layouts(path.stem, rows)
    for name, check in (
        ("korthikanti2022_table4*.csv", check_layer),
        ("zerobubble_*.csv", check_bubbles),
        ("zero_table1*.csv", check_states),
        ("korthikanti2022_fig1*.csv", check_figure),
        ("torchgpipe_memory*.csv", check_torchgpipe),
    ):
        for path in sorted(folder.glob(name)):
            yield from check(path)


def read_folder(folder: Path) -> Iterator[tuple[Path, list[MeasuredLayout]]]:
    """Read all tables of a folder that have layouts and seconds."""
    for path in sorted(folder.glob("vtrain_*.csv")):
        if "calib" not in path.name:
            yield path, read_vtrain(path)
    for path in sorted(folder.glob("*.csv")):
        if not path.name.startswith(NOT_LAYOUTS):
            rows, left_out = read_layouts(path)
            if left_out:
                print(f"{len(left_out)} rows left out: {left_out[0]}")
            if rows:
                yield path, rows


def check_vtrain(table: str, rows: Sequence[MeasuredLayout]) -> Iterator[Verdict]:
    """Errors, choices and order of vTrain's rows."""
    several = any(row.layout.devices > 8 for row in rows)
    # Bang et al. 2024, section 5: 8.37 % on one node, 14.73 % on several.
    rival, bar = ("14.7 % (vTrain)", 0.15) if several else ("8.4 % (vTrain)", 0.084)
    yield from _check_times(table, rows, rival, bar, 0.7 if several else 0.85)


def _check_times(
    table: str, rows: Sequence[MeasuredLayout], rival: str, bar: float, tau_bar: float | None
) -> Iterator[Verdict]:
    """Compare predicted and measured seconds; and the order, if `tau_bar` says what is wanted."""
    scored = [row.predict() for row in rows]
    lost, named = rate_memory(rows, scored)
    kept = [(row, one) for row, one in zip(rows, scored, strict=True) if row.seconds is not None]
    ran = [row for row, _ in kept]
    predicted, measured = [one.seconds for _, one in kept], [row.seconds or 0.0 for row in ran]
    if len(ran) > 1:
        error, trivial = mean_error(predicted, measured), predict_trivially(ran)
        yield Verdict(
            table, "mean error of seconds", len(ran), f"{error:.1%}",
            f"{mean_error(trivial, measured):.0%}", rival, f"{bar:.1%}", error <= bar,
        )  # fmt: skip
    groups = group_rows(ran)
    if tau_bar is not None and groups:
        share = rate_choices(groups, predicted, measured)
        chance = sum(
            sum(measured[i] <= 1.05 * min(measured[j] for j in indices) for i in indices)
            / len(indices)
            for indices in groups
        ) / len(groups)
        yield Verdict(
            table, "choice within 5 % of the best", len(groups), f"{share:.0%}",
            f"{chance:.0%} (by chance)", "", "90%", share >= 0.9,
        )  # fmt: skip
        tau, alone = rate_order(groups, predicted, measured), kendall_tau(predicted, measured)
        yield Verdict(
            table, "Kendall's tau in groups (of all rows)", len(groups), f"{tau:.2f} ({alone:.2f})",
            "0.00", "", f"{tau_bar:.2f}", tau >= tau_bar,
        )  # fmt: skip
    elif tau_bar is not None and len(ran) > 2:
        tau = kendall_tau(predicted, measured)
        yield Verdict(
            table, "Kendall's tau of all rows", len(ran), f"{tau:.2f}", "", "", f"{tau_bar:.2f}",
            tau >= tau_bar,
        )  # fmt: skip
    if lost:
        wrong = sum(not one.fits for _, one in kept)
        yield Verdict(
            table, "out-of-memory rows named", lost, f"{named} of {lost}", "none", "", "all",
            named == lost,
        )  # fmt: skip
        yield Verdict(
            table, "rows that ran, said not to fit", len(kept), str(wrong), "", "", "", None
        )


def check_layouts(table: str, rows: Sequence[MeasuredLayout]) -> Iterator[Verdict]:
    """Seconds of any other table of layouts."""
    known = {
        "korthikanti2022_table5": ("3.7 % (Calculon)", 0.05, None),
        "megatron_sc21_table1": ("none published", 0.05, None),
    }
    rival, bar, tau = next(
        (value for name, value in known.items() if table.startswith(name)),
        ("", 0.15, 0.7),
    )
    yield from _check_times(table, rows, rival, bar, tau)


def check_layer(path: Path) -> Iterator[Verdict]:
    """Milliseconds of one layer of a 22 B model, forward and backward."""
    errors = {"forward": [], "backward": []}  # type: dict[str, list[float]]
    for row in read_rows(path):
        t, b, s = int(row["tp"]), int(row["micro_batch"]), int(row["seq_len"])
        model = Transformer(int(row["hidden"]), 48, int(row["heads"]), s, 51200, b)
        recompute = next((x for x in ("selective", "full") if x in row["experiment"]), "none")
        cluster = make_cluster("a100-80gb", 8)
        parallel = "sequence" in row["experiment"]
        layer = time_layer(model, cluster.device, t, b, parallel, recompute)  # type: ignore[arg-type]
        one = cluster.time_all_reduce(count_hidden_bytes(model, b), t, 1)
        again = 2 if recompute == "full" else 0
        back = layer.inputs + layer.weights + (again + (2.0 if parallel else 0.8)) * one
        errors["forward"].append((layer.forward + 2 * one) * 1e3 / float(row["forward_ms"]) - 1)
        errors["backward"].append(back * 1e3 / float(row["backward_ms"]) - 1)
    for name, values in errors.items():
        error = sum(map(abs, values)) / len(values)
        yield Verdict(
            path.stem, f"mean error of a layer's {name}", len(values), f"{error:.1%}", "", "", "",
            None,
        )  # fmt: skip


def check_bubbles(path: Path) -> Iterator[Verdict]:
    """Bubble rates of schedules, on equal stages with this model's own times.

    The authors removed a layer from the first and from the last stage, so that all stages take as
    long as one in the middle, and computed rates from profiled times of such stages.
    """
    differences: dict[str, list[float]] = {}
    speeds: list[tuple[float, float]] = []
    skipped = 0
    for row in read_rows(path):
        name = ZERO_BUBBLE_NAMES.get(row["schedule"])
        if name is None:
            skipped += 1
            continue
        ranks, n, b = int(row["pp"]), int(row["n_microbatches"]), int(row["micro_batch"])
        hidden, layers, s = int(row["hidden"]), int(row["layers"]) + 2, int(row["seq_len"])
        model = Transformer(hidden, layers, int(row["heads"]), s, 50304, b * n)
        cluster = make_cluster("a100-80gb", ranks, 8, 100e9)
        chunks = layers // ranks if name == "interleaved" else 1
        each = layers // (ranks * chunks)
        layer = time_layer(
            model, cluster.device, 1, b, False, "none", MEGATRON_2023.accumulation_bytes
        )
        stages = ranks * chunks
        transfer = MEGATRON_2023.message_seconds + cluster.time_send(
            count_hidden_bytes(model, b), 1, 1
        )
        times = StageSeconds(
            (layer.forward * each,) * stages,
            (layer.inputs * each,) * stages,
            (layer.weights * each,) * stages,
            transfer,
        )
        _, idle = time_pipeline(name, ranks, n, chunks, times)
        if row["bubble_rate"]:
            differences.setdefault(row["schedule"], []).append(
                abs(idle - float(row["bubble_rate"]))
            )
        if row["samples_per_gpu_per_s"]:
            whole = replace(model, layers=layers - 2)
            layout = ParallelLayout(1, ranks, 1, b, name, chunks)
            step = price_layout(whole, cluster, layout, MEGATRON_2023).seconds
            speeds.append((b * n / step / ranks, float(row["samples_per_gpu_per_s"])))
    for schedule, values in differences.items():
        mean = sum(values) / len(values)
        yield Verdict(
            path.stem, f"bubble rate of {schedule}: mean difference", len(values), f"{mean:.3f}",
            "", "", "0.020", mean <= 0.02,
        )  # fmt: skip
    error = mean_error(*zip(*speeds, strict=True))
    yield Verdict(
        path.stem, "mean error of samples/s", len(speeds), f"{error:.1%}", "", "", "", None
    )
    yield Verdict(
        path.stem, "rows of ZB-H2 and ZB-2p, which the library doesn't have", skipped, "not run",
        "", "", "", None,
    )  # fmt: skip


def check_states(path: Path) -> Iterator[Verdict]:
    """Bytes of states under ZeRO: the formula to the byte, and the printed figure."""
    stages = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
    exact, printed, rows = 0, 0, read_rows(path)
    for row in rows:
        parameters, n = int(float(row["params"])), int(row["dp"])
        nbytes = sum(count_state_bytes(parameters, n, stages[row["stage"]]))
        formula = sum(
            Fraction(int(part.split("P")[0]), n if part.endswith("/N") else 1)
            for part in row["formula"].split("+")
        )
        exact += Fraction(nbytes) == formula * parameters
        # Printed figures are cut off, or rounded, at their last digit.
        digits = len(row["gb_per_device"].partition(".")[2])
        printed += abs(nbytes / 1e9 - float(row["gb_per_device"])) < 10**-digits
    yield Verdict(
        path.stem, "bytes equal to the formula", len(rows), f"{exact} of {len(rows)}", "", "",
        "all", exact == len(rows),
    )  # fmt: skip
    yield Verdict(
        path.stem, "figures equal to those printed", len(rows), f"{printed} of {len(rows)}", "", "",
        "all", printed == len(rows),
    )  # fmt: skip


# Korthikanti et al. 2022, table 3: hidden, layers, heads, tensor, pipeline, chunks, micro-batch,
# batch.
FIGURE_MODELS = {
    "22B": (6144, 48, 64, 8, 1, 1, 4, 4),
    "175B": (12288, 96, 96, 8, 8, 3, 1, 64),
    "530B": (20480, 105, 128, 8, 35, 3, 1, 280),
    "1T": (25600, 128, 160, 8, 64, 1, 1, 512),
}


def check_figure(path: Path) -> Iterator[Verdict]:
    """Bytes of figure 1 of Korthikanti et al.: states of a device's layers, and activations.

    The figures are derived ones, and count layers only: no embedding, no logits.
    """
    worst, rows = 0.0, read_rows(path)
    for row in rows:
        hidden, layers, heads, t, p, chunks, b, batch = FIGURE_MODELS[row["model"]]
        model = Transformer(hidden, layers, heads, 2048, 51200, batch)
        saved = "selective" in row["mode"]
        layout = ParallelLayout(
            t, p, 1, b, "interleaved" if chunks > 1 else "1f1b", chunks,
            "selective" if saved else "none", saved,
        )  # fmt: skip
        if row["quantity"] == "activations":
            nbytes = count_activations(model, layout)
        else:
            parameters = model.layer_parameters * layers / (t * p)
            nbytes = sum(count_state_bytes(parameters, 1, 0, StateBytes(gradients=4)))
        worst = max(worst, abs(nbytes / 2**30 / float(row["gib_per_gpu"]) - 1))
    yield Verdict(
        path.stem, "largest error of bytes", len(rows), f"{worst:.1%}", "", "", "10.0%",
        worst <= 0.1,
    )  # fmt: skip


def check_torchgpipe(path: Path) -> Iterator[Verdict]:
    """Bytes of torchgpipe's models, as far as the table has what they follow from.

    AmoebaNet's "total memory" is that of parameters and their states. U-Net's contains activations,
    and the table has neither batch nor sizes of images; only a lower bound can be said.
    """
    worst, bounds, amoebas, nets = 0.0, 0, 0, 0
    for row in read_rows(path):
        scale = {"M": 1e6, "B": 1e9}[row["params"][-1]]
        parameters = float(row["params"][:-1]) * scale
        total = float(row["total_memory_gib"]) * 2**30
        if row["model"].startswith("AmoebaNet"):
            amoebas += 1
            nbytes = sum(count_state_bytes(parameters, 1, 0, AMOEBANET_BYTES))
            worst = max(worst, abs(nbytes / total - 1))
        else:
            nets += 1
            bounds += sum(count_state_bytes(parameters, 1, 0, StateBytes(4, 4, 0))) <= total
    yield Verdict(
        path.stem, "AmoebaNet: largest error of bytes", amoebas, f"{worst:.1%}", "", "", "10.0%",
        worst <= 0.1,
    )  # fmt: skip
    yield Verdict(
        path.stem, "U-Net: parameters and gradients are below the total", nets,
        f"{bounds} of {nets}", "", "", "can't be predicted", None,
    )  # fmt: skip
