"""Compares the planner with published measurements of transformers.

    python benchmarks/planner.py [--tables DIR] [--check] [--rows]

Each line has the planner's figure, that of a trivial planner (the median throughput of all other
rows), the best published one, and the bar. Tables are read from benchmarks/published. Any table
with the columns of `benchmarks/planned/readers.py` can be added. Nothing is measured, and no
process is started.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script finds modules beside it only

from benchmarks.planned.scores import Verdict  # noqa: E402
from benchmarks.planned.tables import check_folder, read_folder  # noqa: E402

PUBLISHED = ROOT / "benchmarks" / "published"
LONG_TABLE = 200  # rows
HEAD = ("table", "what", "rows", "ours", "trivial", "rival", "bar", "")


def print_verdicts(verdicts: list[Verdict]) -> None:
    """Print a table in Markdown."""
    words = {True: "pass", False: "**miss**", None: ""}
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(*map(str, verdict[:-1]), words[verdict.passed]) for verdict in verdicts]
    for line in lines:
        print("| " + " | ".join(line) + " |")


def print_rows(folder: Path) -> None:
    """Print each row of the tables that have few."""
    for _, rows in read_folder(folder):
        for row in rows if len(rows) <= LONG_TABLE else ():
            scored = row.predict()
            measured = "out of memory" if row.seconds is None else f"{row.seconds:.3f} s"
            shares = ", ".join(f"{name} {share:.0%}" for name, share in scored.shares.items())
            print(
                f"{row.label}, {row.layout.describe()}: {scored.seconds:.3f} s, measured "
                f"{measured}; {scored.memory.total / 2**30:.0f} GiB; {shares}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", type=Path, default=PUBLISHED)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--rows", action="store_true", help="print rows of small tables, too")
    options = parser.parse_args()
    if not options.tables.is_dir():
        parser.error(f"--tables {options.tables} is no folder")
    verdicts = list(check_folder(options.tables))
    print_verdicts(verdicts)
    if options.rows:
        print_rows(options.tables)
    return int(options.check and any(verdict.passed is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
