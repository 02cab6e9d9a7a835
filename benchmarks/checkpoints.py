"""Measures the cost of checkpoints while a GPT of 19 M parameters trains.

The state with AdamW has 228 MB. It is written in the background, or the run waits for it.

    python benchmarks/checkpoints.py [--every 10 --rounds 20 --ways background durable]
                                     [--model medium --workers 2 --batch 12 --folder DIR]

One run trains in blocks of `--every` steps. A round has a block without a checkpoint, and a block
for each way with a checkpoint in its first step, in rotating order. A block ends when its
checkpoint is on the disk. The result is the ratio of whole blocks; the bar is background / none <=
1.03. Rounds in which other processes had more than 3 % of the processors don't count. The run ends
when enough rounds count, or after `--patience` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import ONE_THREAD, Row, arguments, ratio, report  # noqa: E402

NONE = "none"
# "way", "seconds", "mine" (processor seconds of the workers), "others" (part of the processors that
# other processes had), and the run's own figures of its checkpoints.
Block = dict[str, float | str]
WAYS = ("background", "durable")
BAR = 1.03
WARM = 1  # first rounds, which don't count: the first copy allocates its memory
QUIET = 0.03  # part of the processors that others may have in a round that counts
FEWEST = 3  # fewest rounds for a result
MOST = 20  # longest run, as a multiple of `--rounds`


def train(options: argparse.Namespace) -> None:
    """Train on one worker. The first worker writes the figures of each block to blocks.json."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    blocks = plan(options.ways, WARM + MOST * options.rounds)
    tokens = torch.randint(
        0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )

    # The few sequences of tokens are repeated, as only the time matters.
    class Endless(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(blocks) * options.every * options.batch * options.workers

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = tokens[index % len(tokens)]
            return row[:-1], row[1:]

    torch.manual_seed(0)
    results: list[Block] = []
    with pl.start(folder=options.inside, name="run", trace="off") as run:
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(Endless(), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        tally, processor_times = run._saving.copy_tally(), processors()
        start = time.perf_counter()
        for x, y in loader:
            # A block: a checkpoint in its first step, and a wait for the disk at the end.
            way, step_in_block = blocks[run.steps // options.every], run.steps % options.every
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step_in_block == 0 and way != NONE:
                run.save(background=way == "background", keep=1)
            if step_in_block == options.every - 1:
                run._saving.wait_for_write()
                seconds, tally_before, tally, earlier_times, processor_times = (
                    time.perf_counter() - start,
                    tally,
                    run._saving.copy_tally(),
                    processor_times,
                    processors(),
                )
                figures = {name: tally[name] - tally_before[name] for name in tally}
                own_seconds, busy_seconds, seconds = (
                    run.size * run.mean(processor_times[0] - earlier_times[0]),
                    run.mean(processor_times[1] - earlier_times[1]),
                    run.mean(seconds),
                )
                others = (
                    max(0.0, busy_seconds - own_seconds) / seconds / len(os.sched_getaffinity(0))
                )
                results.append(
                    {
                        "way": way,
                        "seconds": seconds,
                        "mine": own_seconds,
                        "others": others,
                        **figures,
                    }
                )
                run.print(
                    f"{way}: {seconds:.2f} s; other processes had {others:.1%} of the processors",
                    flush=True,
                )
                if run.is_first:
                    Path(options.inside, "blocks.json").write_text(json.dumps(results))
                # All workers have the same means, so all of them break here.
                is_late = sum(float(block["seconds"]) for block in results) > options.patience
                if is_late or len(quiet(results, 1 + len(options.ways))) == options.rounds:
                    break
                start = time.perf_counter()


def plan(ways: Sequence[str], rounds: int) -> list[str]:
    """List the way of each block. The order rotates from round to round."""
    names = [NONE, *ways]
    return [
        name
        for index in range(rounds)
        for name in names[index % len(names) :] + names[: index % len(names)]
    ]


def processors() -> tuple[float, float]:
    """Read the processor seconds of this process, and of all processes of the machine.

    The second number includes the time that the machine's host has taken away.
    """
    # The first line of /proc/stat has the sums over all cores, in ticks.
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = ticks
    return time.process_time(), (user + nice + system + irq + soft + steal) / os.sysconf(
        "SC_CLK_TCK"
    )


def quiet(found: Sequence[Block], size: int) -> list[Sequence[Block]]:
    """List the rounds that count. `found` has all blocks, and a round has `size` of them."""
    rounds = [
        found[start : start + size] for start in range(WARM * size, len(found) - size + 1, size)
    ]
    return [blocks for blocks in rounds if all(float(block["others"]) < QUIET for block in blocks)]


def judge(found: Sequence[Block], ways: Sequence[str], every: int) -> list[Row]:
    """Make rows that compare each way with no checkpoints.

    Args:
        found: All blocks, in the order in which they ran.
        ways: Names of the ways.
        every: Steps of a block.
    """
    counted = [block for round_blocks in quiet(found, 1 + len(ways)) for block in round_blocks]
    blocks = {way: [block for block in counted if block["way"] == way] for way in (NONE, *ways)}
    seconds = {
        way: [float(block["seconds"]) for block in way_blocks] for way, way_blocks in blocks.items()
    }
    rows = []
    for way in ways:
        way_blocks = blocks[way]
        stall, write, nbytes = (
            statistics.median(float(block[name]) for block in way_blocks)
            for name in ("stall_seconds", "write_seconds", "nbytes")
        )
        note = (
            f" (stall {stall * 1e3:.0f} ms, {nbytes / 1e6:.0f} MB written in {write:.2f} s: "
            f"{nbytes / 1e6 / write:.0f} MB/s)"
        )
        medians = {name: statistics.median(seconds[name]) / every for name in (NONE, way)}
        bar = BAR if way == "background" else None
        what = f"a checkpoint every {every} steps, {way}"
        rows.append(
            Row(
                what,
                medians,
                f"{way} / none",
                ratio(seconds[way], seconds[NONE]),
                most=bar,
                note=note,
            )
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "checkpoints", rounds=20)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--every",
        type=int,
        default=10,
        help="number of steps between checkpoints (default %(default)s)",
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument(
        "--model", default="medium", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--batch",
        type=int,
        default=12,
        help="samples of a step, for each worker (default %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1800.0,
        help="seconds after which it ends with fewer rounds (default %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for checkpoints (default: that of temporary files)"
    )
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.inside:
        train(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        train_options = [
            f"--{name}={getattr(options, name)}"
            for name in ("every", "rounds", "model", "workers", "batch", "patience")
        ]
        command = [
            "-m",
            "paceline",
            "run",
            "--workers",
            str(options.workers),
            __file__,
            *train_options,
            "--ways",
            *options.ways,
        ]
        environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, *command, "--inside", folder],
            check=True,
            env=environ,
            stderr=subprocess.DEVNULL,
        )
        results = json.loads(Path(folder, "blocks.json").read_text())
    rounds = len(quiet(results, 1 + len(options.ways)))
    print(f"{rounds} quiet rounds of {len(results) // (1 + len(options.ways)) - WARM}")
    # A busy machine gives no result instead of a wrong one.
    if rounds < FEWEST:
        sys.exit(f"fewer than {FEWEST} quiet rounds: run it when nothing else runs on the machine")
    if (
        not report(
            "checkpoints", judge(results, options.ways, options.every), options, {"blocks": results}
        )
        and options.check
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
