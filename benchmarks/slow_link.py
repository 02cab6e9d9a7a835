"""Checks that a run names the host whose link gets slow, and that its advice holds.

    python benchmarks/slow_link.py [--quick]

Three hosts of a lab with links of 1 Gbit/s train a model of some MB. At a step the link of the last
host falls to 100 Mbit/s. The report has to name that host. Then the run is repeated with the
advised codec. The gain has to be within 25 % of the predicted one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import lab
from paceline.observe.report import format_report

BAR = 0.25  # largest relative error of the predicted gain
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.manual_seed(0)
steps = int(sys.argv[2])
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
loader = DataLoader(TensorDataset(torch.randn(96 * steps, 256), torch.randint(10, (96 * steps,))), batch_size=96)
with pl.start(folder=sys.argv[1], name="run", seed=1) as run:
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""  # noqa: E501


def train(
    folder: Path, steps: int, slow: int, sync: str
) -> tuple[dict[str, Any], list[float], str]:
    """Train in the lab, and slow the link of the last host.

    Args:
        folder: Folder to make for the run.
        steps: Number of steps.
        slow: Step before which the link gets slow.
        sync: Strategy.

    Returns:
        The summary, the seconds of each step, and the output.
    """
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with lab.cluster(hosts=3, workers=1, bandwidth="1gbit") as cluster:
        # Hosts count from 0, so host 2 is the last one.
        faults = f"link(host=2, bandwidth='100mbit', step={slow})"
        outcome = cluster.run(
            script,
            str(folder),
            str(steps),
            folder=folder,
            faults=faults,
            sync=sync,
            environ={"OMP_NUM_THREADS": "1"},
        )
    if outcome.code:
        sys.exit(outcome.output)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seconds = [sum(line["seconds"].values()) for line in lines if "seconds" in line]
    return json.loads((folder / "run/summary.json").read_text()), seconds, outcome.output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps, slow = (200, 80) if parser.parse_args().quick else (500, 200)
    with tempfile.TemporaryDirectory() as root:
        summary, seconds, output = train(Path(root) / "exact", steps, slow, "AllReduce()")
        links = summary["links"]
        print(
            "\n".join(
                line for line in output.splitlines() if "exchanges take" in line or "slow:" in line
            )[:2000]
        )
        print(format_report(Path(root) / "exact/run"))
        if [link["hosts"] for link in links] != [["host2"]]:
            sys.exit(
                f"the run names {[link['hosts'] for link in links]}, but the link of host2 got slow"
            )
        _, advised_seconds, _ = train(Path(root) / "coded", steps, slow, "AllReduce(codec=int8())")
    # Only steps after the link was found slow.
    gain = statistics.median(seconds[links[0]["step"] :]) / statistics.median(
        advised_seconds[links[0]["step"] :]
    )
    error = abs(gain / links[0]["gain"] - 1) if links[0]["gain"] else float("inf")
    print(
        f"the run names host2; predicted gain {links[0]['gain']}, measured {gain:.2f}: "
        f"{error:.0%} off, bar: at most {BAR:.0%}"
    )
    sys.exit(error > BAR)


if __name__ == "__main__":
    main()
