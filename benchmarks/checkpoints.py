"""What checkpoints cost while a GPT of 19 M parameters trains (AdamW: 228 MB of state), written in
the background or waited for.

    python benchmarks/checkpoints.py [--every 10 --rounds 20 --ways background durable]
                                     [--model medium --workers 2 --batch 12 --folder DIR]

One run trains in blocks of `every` steps; in each round there is a block without a checkpoint and
one for each way, in rotating order, with a checkpoint in its first step. A block ends when its
checkpoint is on the disk. The ratio is that of whole blocks. The bar: background / none <= 1.03.
Rounds in which other processes had more than 3 % of the processors are not counted: it trains until
there are enough others, or until its patience ends.
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
# "way", "seconds", "mine" (processor seconds of the workers), "others" (part), and what the run
# counts
Block = dict[str, float | str]
WAYS = ("background", "durable")
BAR = 1.03
WARM = 1  # rounds that aren't counted: the first copy gets its memory
QUIET = 0.03  # the part of the processors that others may have in a round that counts
FEWEST = 3  # rounds that tell something
MOST = 20  # times as many rounds as asked for, if too few are quiet


def train(options: argparse.Namespace) -> None:
    """The script of each worker; the first writes down the seconds of each block, and of its
    checkpoint.
    """
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    blocks = plan(options.ways, WARM + MOST * options.rounds)
    tokens = torch.randint(
        0, VOCAB, (64 * options.batch, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )

    class Endless(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(blocks) * options.every * options.batch * options.workers

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = tokens[index % len(tokens)]
            return row[:-1], row[1:]

    torch.manual_seed(0)
    found: list[Block] = []
    with pl.start(folder=options.inside, name="run", trace="off") as run:
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(Endless(), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        tally, used = run._saving.copy_tally(), processors()
        began = time.perf_counter()
        for x, y in loader:
            way, number = blocks[run.steps // options.every], run.steps % options.every
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0 and way != NONE:
                run.save(background=way == "background", keep=1)
            if number == options.every - 1:
                run._saving.wait_for_write()
                seconds, before, tally, earlier, used = (
                    time.perf_counter() - began,
                    tally,
                    run._saving.copy_tally(),
                    used,
                    processors(),
                )
                spent = {name: tally[name] - before[name] for name in tally}
                mine, busy, seconds = (
                    run.size * run.mean(used[0] - earlier[0]),
                    run.mean(used[1] - earlier[1]),
                    run.mean(seconds),
                )
                others = max(0.0, busy - mine) / seconds / len(os.sched_getaffinity(0))
                found.append(
                    {"way": way, "seconds": seconds, "mine": mine, "others": others, **spent}
                )
                run.print(
                    f"{way}: {seconds:.2f} s; others had {others:.1%} of the processors", flush=True
                )
                if run.is_first:
                    Path(options.inside, "blocks.json").write_text(json.dumps(found))
                late = sum(float(block["seconds"]) for block in found) > options.patience
                if late or len(quiet(found, 1 + len(options.ways))) == options.rounds:
                    break
                began = time.perf_counter()


def plan(ways: Sequence[str], rounds: int) -> list[str]:
    """The way of each block; who begins rotates from round to round."""
    names = [NONE, *ways]
    return [
        name
        for number in range(rounds)
        for name in names[number % len(names) :] + names[: number % len(names)]
    ]


def processors() -> tuple[float, float]:
    """Seconds of processors that this process has had so far, and all processes of the machine
    (with what its host took away).
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = ticks
    return time.process_time(), (user + nice + system + irq + soft + steal) / os.sysconf(
        "SC_CLK_TCK"
    )


def quiet(found: Sequence[Block], size: int) -> list[Sequence[Block]]:
    """The rounds that count, of `size` blocks each."""
    rounds = [
        found[start : start + size] for start in range(WARM * size, len(found) - size + 1, size)
    ]
    return [each for each in rounds if all(float(block["others"]) < QUIET for block in each)]


def judge(found: Sequence[Block], ways: Sequence[str], every: int) -> list[Row]:
    """Each way against none; `found` has the blocks in the order in which they ran."""
    counted = [block for each in quiet(found, 1 + len(ways)) for block in each]
    blocks = {way: [block for block in counted if block["way"] == way] for way in (NONE, *ways)}
    seconds = {way: [float(block["seconds"]) for block in of] for way, of in blocks.items()}
    rows = []
    for way in ways:
        saved = blocks[way]
        stall, write, nbytes = (
            statistics.median(float(block[name]) for block in saved)
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
        help="steps from one checkpoint to the next (default %(default)s)",
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
        help="samples in a step, for each worker (default %(default)s)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=1800.0,
        help="seconds after which it makes do with fewer rounds (default %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints go (default: where temporary files do)"
    )
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.inside:
        train(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = [
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
            *given,
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
        found = json.loads(Path(folder, "blocks.json").read_text())
    rounds = len(quiet(found, 1 + len(options.ways)))
    print(f"{rounds} quiet rounds of {len(found) // (1 + len(options.ways)) - WARM}")
    if rounds < FEWEST:
        sys.exit(
            f"less than {FEWEST} tell nothing: run it while the machine has nothing else to do"
        )
    if (
        not report(
            "checkpoints", judge(found, options.ways, options.every), options, {"blocks": found}
        )
        and options.check
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
