"""Steps of a 19 M GPT on the two hosts of a lab, 2 workers each, with less on the link: codecs and
local SGD against torch's DDP.

Every launch trains the same model on the same batches, SGD, and its weights are checked against one
process's (see `peers/checks.py`). Rounds of all variants alternate. The bars are those of 100
Mbit/s and of 1 Gbit/s.

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
    """paceline with `sync` (None: a peer of the catalogue); timed steps are a multiple of
    `period`; bars against DDP by bandwidth.
    """

    sync: str | None
    check: str = "near"
    period: int = 4
    bars: tuple[tuple[str, float], ...] = ()

    def peer(self, name: str) -> Peer:
        """How it is launched."""
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
SECONDS = 6.0  # timed, of a launch, roughly: no fewer than one period


def measure(
    bandwidth: str, names: Sequence[str], rounds: int, guess: dict[str, float], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """What the launches of each way gave, round by round."""
    setting, model = SETTINGS[PLACES[bandwidth]], MODELS[MODEL]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with place(setting) as where:
        for number in range(rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                way = WAYS[name]
                steps = max(1, round(SECONDS / guess.get(name, 1.0) / way.period)) * way.period
                found[name].append(
                    _launch(way.peer(name), Cell(setting, model, steps), where, number, folder)
                )
                guess[name] = found[name][-1]["step"]
                print(
                    (
                        f"{bandwidth}  round {number + 1}  {name}: {guess[name] * 1e3:.1f} ms, "
                        f"{found[name][-1]['sent'] / 1e6:.2f} MB"
                    ),
                    flush=True,
                )
    return found


def _launch(peer: Peer, cell: Cell, where: Place, number: int, folder: Path) -> dict[str, Any]:
    measurement = Measurement([cell], [peer], 1, 0, 2, Records(folder / "sending.jsonl"), say=print)
    record = measurement.round(cell, peer, number, where, measurement.reference(cell))
    if record["why"] is not None:
        raise LaunchError(f"{peer.title}: {record['why']}")
    return record


def judge(bandwidth: str, found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Each of ours against DDP, and against DDP with its fp16 hook."""
    rows = []
    steps = {name: [record["step"] for record in records] for name, records in found.items()}
    for name, records in found.items():
        if WAYS[name].sync is None:
            continue
        sent = statistics.median(record["sent"] for record in records)
        for other in ("ddp", "ddp-fp16"):
            if other not in steps:
                continue
            bar = dict(WAYS[name].bars).get(bandwidth) if other == "ddp" else None
            medians = {side: statistics.median(steps[side]) for side in (other, name)}
            note = f" ({sent / 1e6:.2f} MB a step)" if other == "ddp" else ""
            rows.append(
                Row(
                    f"{bandwidth}, {name}",
                    medians,
                    f"{other} / {name}",
                    ratio(steps[other], steps[name]),
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
        slow = bandwidth == "100mbit"
        guess = dict.fromkeys(WAYS, 0.7) | {
            "ddp": 10.0 if slow else 1.2,
            "ddp-fp16": 5.0 if slow else 0.8,
            "exact": 7.0 if slow else 0.8,
        }
        found = measure(bandwidth, options.ways, options.rounds, guess, options.out.parent)
        rows += judge(bandwidth, found)
        raw[bandwidth] = {
            name: [{"step": r["step"], "sent": r["sent"], "away": r["away"]} for r in records]
            for name, records in found.items()
        }
    if not report("sending", rows, options, json.loads(json.dumps(raw))) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
