"""Steps of two or more trees of paceline's source, before against after: medians of interleaved
rounds, and ratios to the first tree.

git worktree add /tmp/before COMMIT
python benchmarks/trees.py /tmp/before . [--models gpt-19m gpt-0.9m tiny cnn] [--ddp] [--rounds 60]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness import Crew, Row, arguments, interleave, ratio, report
from training import SETUPS

HERE = Path(__file__).resolve().parent
WORKERS = 2


def crew(model: str, variant: str, tree: Path) -> Crew:
    """Start workers that train with the paceline of this tree, or with DDP."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    script = [str(HERE / "training.py"), "--serve", model, "--variants", variant]
    return Crew(f"{variant} of {tree}", [["env", f"PYTHONPATH={tree}", *launch, *script]], WORKERS)


def seconds(workers: Crew, variant: str, steps: int) -> float:
    """Ask for a round; give the seconds of a step of the slowest worker."""
    return max(answer["seconds"] for answer in workers.ask(variant=variant, steps=steps))


def measure(
    model: str, asked: Mapping[str, tuple[str, str]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step in every round, of each variant and tree that is asked for."""
    crews: dict[str, Crew] = {}
    try:
        for name, (variant, tree) in asked.items():
            crews[name] = crew(model, variant, Path(tree).resolve())
        steps = SETUPS[model].steps
        variants = {
            name: partial(seconds, crews[name], variant, steps)
            for name, (variant, _) in asked.items()
        }
        return interleave(variants, rounds, warmup=3)
    finally:
        for one in crews.values():
            one.close()


def main() -> None:
    parser = arguments(__doc__ or "", "trees", rounds=60)
    parser.add_argument(
        "trees", nargs="+", help="folders that hold a paceline, the one to compare with first"
    )
    parser.add_argument("--models", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument(
        "--most", type=float, default=1.01, help="the ratio that is held (default %(default)s)"
    )
    parser.add_argument("--ddp", action="store_true", help="compare each tree with DDP, too")
    options = parser.parse_args()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for model in options.models:
        asked = {tree: ("paceline", tree) for tree in options.trees}
        samples = raw[model] = measure(
            model,
            {**asked, "ddp": ("ddp", options.trees[0])} if options.ddp else asked,
            options.rounds,
        )
        first, *others = options.trees
        rows += [
            Row(
                model,
                {},
                f"{tree} / {first}",
                ratio(samples[tree], samples[first]),
                most=options.most,
            )
            for tree in others
        ]
        rows += [
            Row(model, {}, f"{tree} / ddp", ratio(samples[tree], samples["ddp"]))
            for tree in (first, *others)
            if options.ddp
        ]
    if not report("trees", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
