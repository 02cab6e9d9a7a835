"""Compares codecs and local SGD with torch's DDP on slow links.

A GPT of 19 M parameters trains on the two hosts of a lab, with 2 workers each.

Each launch trains the same model on the same batches with SGD, and its weights are checked against
those of one process (see `peers/checks.py`). Rounds of all variants take turns. The bars are for
100 Mbit/s and for 1 Gbit/s.

    python benchmarks/sending.py [--bandwidth 100mbit 1gbit] [--ways ddp int8 ...]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness import Row, arguments, ratio, report  # noqa: E402
from benchmarks.peers.catalogue import MODELS, PEERS, SETTINGS, Cell, Peer  # noqa: E402
from benchmarks.peers.launches import LaunchError  # noqa: E402
from benchmarks.peers.measuring import Measurement  # noqa: E402
from benchmarks.peers.places import Place, place, tidy  # noqa: E402
from benchmarks.peers.records import Records  # noqa: E402

MODEL = "gpt-19m"
PLACES = {"100mbit": "two-hosts-100m", "1gbit": "two-hosts-1g"}


@dataclass(frozen=True)
class Way:
    """A way to exchange gradients.

    Attributes:
        sync: Strategy of paceline. None: a peer of the catalogue.
        check: Name of the check of the weights.
        period: Number of timed steps is a multiple of it.
        bars: Lowest ratio to DDP, by bandwidth.
    """

    sync: str | None
    check: str = "near"
    period: int = 4
    bars: tuple[tuple[str, float], ...] = ()

    def peer(self, name: str) -> Peer:
        """Make the peer that launches it. `name` is the name of the way."""
        if self.sync is None:
            return PEERS[name]
        return Peer(
            name,
            name,
            "run_paceline.py",
            "paceline run",
            arguments=("--sync", self.sync),
            check=self.check,
        )


WAYS = {
    "ddp": Way(None),
    "ddp-fp16": Way(None),
    "exact": Way("AllReduce()", "exact", bars=(("100mbit", 1.35),)),
    "half": Way("AllReduce(codec=half())", "half"),
    "int8": Way("AllReduce(codec=int8())", bars=(("100mbit", 4.5), ("1gbit", 2.3))),
    "sign": Way("AllReduce(codec=error_feedback(sign(1024)))", bars=(("1gbit", 2.7),)),
    "topk": Way("AllReduce(codec=error_feedback(topk(0.01)))", bars=(("100mbit", 12.0),)),
    "topk-sampled": Way(
        'AllReduce(codec=error_feedback(topk(0.01, threshold="sampled")))',
        bars=(("100mbit", 12.0), ("1gbit", 2.7)),
    ),
    "powersgd": Way(
        "AllReduce(codec=error_feedback(powersgd(4)))", bars=(("100mbit", 12.0), ("1gbit", 2.7))
    ),
    "diloco": Way(
        "LocalSGD(every=32, outer=nesterov(0.7, 0.9), codec=int8())",
        period=32,
        bars=(("100mbit", 20.0), ("1gbit", 2.7)),
    ),
}
SECONDS = 6.0  # approximate timed seconds of a launch, which has at least one period


def measure(
    bandwidth: str, names: Sequence[str], rounds: int, guess: dict[str, float], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Launch each way in each round, in turn.

    Args:
        bandwidth: Bandwidth of the hosts' links.
        names: Names of the ways.
        rounds: Number of rounds.
        guess: Seconds of a step by way, which are updated.
        folder: Folder for the records.

    Returns:
        The records of each way.
    """
    setting, model = SETTINGS[PLACES[bandwidth]], MODELS[MODEL]
    records_by_way: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with place(setting) as lab_place:
        for round_number in range(rounds):
            turn = round_number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                way = WAYS[name]
                # As many whole periods as fit into the time, by the last known step.
                steps = max(1, round(SECONDS / guess.get(name, 1.0) / way.period)) * way.period
                records_by_way[name].append(
                    _launch(
                        way.peer(name), Cell(setting, model, steps), lab_place, round_number, folder
                    )
                )
                guess[name] = records_by_way[name][-1]["step"]
                print(
                    (
                        f"{bandwidth}  round {round_number + 1}  {name}: "
                        f"{guess[name] * 1e3:.1f} ms, "
                        f"{records_by_way[name][-1]['sent'] / 1e6:.2f} MB"
                    ),
                    flush=True,
                )
    return records_by_way


def _launch(peer: Peer, cell: Cell, where: Place, number: int, folder: Path) -> dict[str, Any]:
    measurement = Measurement([cell], [peer], 1, 0, 2, Records(folder / "sending.jsonl"), say=print)
    record = measurement.round(cell, peer, number, where, measurement.reference(cell))
    # Wrong weights or a failed launch end the benchmark.
    if record["why"] is not None:
        raise LaunchError(f"{peer.title}: {record['why']}")
    return record


def judge(bandwidth: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Make rows that compare each way with DDP, and with DDP and its fp16 hook."""
    rows = []
    steps = {name: [record["step"] for record in records] for name, records in found.items()}
    for name, records in found.items():
        if WAYS[name].sync is None:
            continue
        sent_nbytes = statistics.median(record["sent"] for record in records)
        for peer in ("ddp", "ddp-fp16"):
            if peer not in steps:
                continue
            bar = dict(WAYS[name].bars).get(bandwidth) if peer == "ddp" else None
            medians = {side: statistics.median(steps[side]) for side in (peer, name)}
            note = f" ({sent_nbytes / 1e6:.2f} MB a step)" if peer == "ddp" else ""
            rows.append(
                Row(
                    f"{bandwidth}, {name}",
                    medians,
                    f"{peer} / {name}",
                    ratio(steps[peer], steps[name]),
                    least=bar,
                    note=note,
                )
            )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "sending", rounds=3)
    parser.add_argument("--bandwidth", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args(words)
    tidy()
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for bandwidth in options.bandwidth:
        is_slow = bandwidth == "100mbit"
        # First guesses of seconds of a step, for the number of steps of the first launch.
        guess = dict.fromkeys(WAYS, 0.7) | {
            "ddp": 10.0 if is_slow else 1.2,
            "ddp-fp16": 5.0 if is_slow else 0.8,
            "exact": 7.0 if is_slow else 0.8,
        }
        records_by_way = measure(bandwidth, options.ways, options.rounds, guess, options.out.parent)
        rows += judge(bandwidth, records_by_way)
        raw[bandwidth] = {
            name: [
                {"step": record["step"], "sent": record["sent"], "away": record["away"]}
                for record in records
            ]
            for name, records in records_by_way.items()
        }
    if not report("sending", rows, options, json.loads(json.dumps(raw))) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
