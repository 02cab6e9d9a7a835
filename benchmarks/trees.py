"""Compares the steps of two or more source trees of paceline.

    git worktree add /tmp/before COMMIT
    python benchmarks/trees.py /tmp/before . [--models gpt-19m gpt-0.9m tiny cnn] [--ddp]
                               [--rounds 60]

The trees take turns. The result has medians, and ratios to the first tree.
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
    """Start workers that train with the paceline of a tree, or with DDP.

    Args:
        model: Name of the model.
        variant: Name of the program, "paceline" or "ddp".
        tree: Folder that has a paceline.
    """
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(WORKERS),
    ]
    script = [str(HERE / "training.py"), "--serve", model, "--variants", variant]
    # PYTHONPATH comes before installed packages, so workers import the paceline of the tree.
    return Crew(f"{variant} of {tree}", [["env", f"PYTHONPATH={tree}", *launch, *script]], WORKERS)


def seconds(workers: Crew, variant: str, steps: int) -> float:
    """Train a round, and return the seconds of a step of the slowest worker.

    Args:
        workers: The crew.
        variant: Name of the program.
        steps: Steps of the round.
    """
    return max(answer["seconds"] for answer in workers.ask(variant=variant, steps=steps))


def measure(
    model: str, asked: Mapping[str, tuple[str, str]], rounds: int
) -> dict[str, list[float]]:
    """Measure all variants and trees, in turn.

    Args:
        model: Name of the model.
        asked: Program and tree by name.
        rounds: Number of rounds.

    Returns:
        Seconds of a step in each round, by name.
    """
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
        for started_crew in crews.values():
            started_crew.close()


def main() -> None:
    parser = arguments(__doc__ or "", "trees", rounds=60)
    parser.add_argument(
        "trees",
        nargs="+",
        help="folders that have a paceline; the first is the one to compare with",
    )
    parser.add_argument("--models", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument(
        "--most",
        type=float,
        default=1.01,
        help="highest ratio to the first tree (default %(default)s)",
    )
    parser.add_argument("--ddp", action="store_true", help="compare each tree with DDP, too")
    options = parser.parse_args()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for model in options.models:
        variants = {tree: ("paceline", tree) for tree in options.trees}
        samples = raw[model] = measure(
            model,
            {**variants, "ddp": ("ddp", options.trees[0])} if options.ddp else variants,
            options.rounds,
        )
        first, *other_trees = options.trees
        rows += [
            Row(
                model,
                {},
                f"{tree} / {first}",
                ratio(samples[tree], samples[first]),
                most=options.most,
            )
            for tree in other_trees
        ]
        rows += [
            Row(model, {}, f"{tree} / ddp", ratio(samples[tree], samples["ddp"]))
            for tree in (first, *other_trees)
            if options.ddp
        ]
    if not report("trees", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
