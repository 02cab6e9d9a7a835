"""Measures all workers and links, and writes cluster.json.

It is the script of `paceline probe` and `paceline lab probe`.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import paceline as pl
from paceline.cluster import topology_file
from paceline.observe.cluster_report import describe_cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="dtypes of matrix products")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cluster.json"),
        help="file to write, on the host of the first worker",
    )
    parser.add_argument("--quiet", action="store_true", help="print no table")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    options = parser.parse_args()

    with pl.start(folder=options.folder, trace="off") as run:
        # Fail before the measurement if the file can't be written.
        if run.is_first:
            topology_file.check_target(options.out)
        start = time.perf_counter()
        topology = pl.probe(run, dtypes=options.dtypes.split(","))
        seconds = run.mean(time.perf_counter() - start)
        if run.is_first:
            topology_file.write_topology(options.out, topology)
        if not options.quiet:
            run.print(describe_cluster(topology))
        run.print(f"measured in {seconds:.1f} s, written to {options.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # Without a traceback: it would show no code of the user.
        sys.exit(128 + signal.SIGINT)
