"""The measurement: for each cell a reference, the best bucket size, then rounds in which all
peers take turns; recorded at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import environments
from benchmarks.peers.catalogue import (
    PEERS,
    SIZES_MB,
    WARM,
    Cell,
    Peer,
    Setting,
    launch_seconds,
    trial,
    trial_seconds,
)
from benchmarks.peers.checks import complaint, telling
from benchmarks.peers.launches import LaunchError, launch, sent
from benchmarks.peers.places import Here, Place, place
from benchmarks.peers.records import Record, Records

REFERENCES = environments.BENCH / "references"
KEPT = 16  # losses that are recorded of each launch


@dataclass
class Measurement:
    """What to measure, and where the records go.

    `retry`: launch again what failed. `say` is told how it goes.
    """

    cells: Sequence[Cell]
    peers: Sequence[Peer]
    rounds: int
    seed: int
    cores: int
    records: Records
    retry: bool = False
    say: Callable[[str], None] = print
    _failed: set[tuple[str, str]] = field(default_factory=set)

    def run(self) -> None:
        """Measure all cells; those of one setting share its hosts."""
        for setting in dict.fromkeys(cell.setting for cell in self.cells):
            mine = [cell for cell in self.cells if cell.setting == setting and self.missing(cell)]
            if not mine:
                continue
            with place(setting) as where:
                for cell in mine:
                    self.measure(cell, where)

    def here(self, cell: Cell) -> list[Peer]:
        """The peers that run in a cell and are installed."""
        fitting = [peer for peer in self.peers if peer.only in (None, cell.setting.name)]
        return [peer for peer in fitting if environments.made(peer.environment)]

    def missing(self, cell: Cell) -> list[tuple[int, Peer]]:
        """The rounds that still have to be launched, in their order: who begins rotates from
        round to round.
        """
        peers = self.here(cell)
        turns = []
        for number in range(self.rounds):
            first = number % max(len(peers), 1)
            turns += [(number, peer) for peer in peers[first:] + peers[:first]]
        return [(number, peer) for number, peer in turns if self._due(cell, peer, number)]

    def _due(self, cell: Cell, peer: Peer, number: int) -> bool:
        if (cell.name, peer.name) in self._failed:
            return False
        known = [self._found(cell, peer, index) for index in range(self.rounds)]
        failed = [record is not None and record["why"] is not None for record in known]
        if any(failed) and not self.retry:
            return False
        return failed[number] or known[number] is None

    def _found(self, cell: Cell, peer: Peer, number: int) -> Record | None:
        return self.records.find(
            "round", cell=cell.name, peer=peer.name, round=number, steps=cell.steps, seed=self.seed
        )

    def measure(self, cell: Cell, where: Place) -> None:
        """All rounds of a cell."""
        reference = self.reference(cell)
        for number, peer in self.missing(cell):
            if (cell.name, peer.name) in self._failed:
                continue
            record = self.round(cell, peer, number, where, reference)
            if record["why"] is not None:
                self._failed.add((cell.name, peer.name))
            outcome = record["why"] or f"{record['step'] * 1e3:.2f} ms"
            self.say(f"{cell.name}  round {number + 1} of {self.rounds}  {peer.title}: {outcome}")

    def round(self, cell: Cell, peer: Peer, number: int, where: Place, reference: Record) -> Record:
        """One launch of a peer, checked and recorded.

        A step's time is that of the slowest worker.
        """
        record: Record = {
            "kind": "round",
            "cell": cell.name,
            "peer": peer.name,
            "round": number,
            "steps": cell.steps,
            "seed": self.seed,
        }
        record |= {"when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "bucket": None, "why": None}
        arguments = (*self._arguments(cell), "--reference", str(_weights(reference)))
        try:
            record["bucket"] = bucket = (
                self.bucket(cell, where) if "{bucket}" in peer.arguments else None
            )
            answers = launch(peer, where, arguments, deadline=self._patience(cell), bucket=bucket)
        except LaunchError as error:
            return self.records.add(record | {"why": str(error)})
        workers = 1 if peer.launcher == "alone" else cell.setting.workers
        record["why"] = complaint(peer.check, answers, workers, cell.steps, reference["alone"])
        if answers:
            record["versions"] = answers[0]["versions"]
        if record["why"] is None:
            seconds = [
                max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)
            ]
            losses = [
                sum(step) / len(step)
                for step in zip(*(answer["losses"] for answer in answers), strict=True)
            ]
            record |= {
                "step": max(sum(answer["seconds"]) for answer in answers) / cell.steps,
                "seconds": seconds,
                "losses": losses[-KEPT:],
                "away": max(answer["away"] for answer in answers),
                "sha256": answers[0]["sha256"],
                "sent": sent(answers, "loopback" if isinstance(where, Here) else "links"),
            }
        return self.records.add(record)

    def reference(self, cell: Cell) -> Record:
        """The weights of one process after the steps of a cell, on disk; trained on this
        machine, outside any lab.
        """
        key = {
            "model": cell.model.name,
            "workers": cell.setting.workers,
            "steps": cell.steps,
            "seed": self.seed,
            "code": _code(),
        }
        known = self.records.find("reference", **key)
        if known is None or not _weights(known).exists():
            REFERENCES.mkdir(parents=True, exist_ok=True)
            with place_here() as where:
                saved = _weights(key).with_suffix(".new")
                answers = launch(
                    PEERS["none"],
                    where,
                    (*self._arguments(cell), "--save", str(saved)),
                    deadline=2 * self._patience(cell),
                )
                saved.rename(_weights(key))
            seen = {name: answers[0][name] for name in ("alone", "alone_warmed", "moved", "sha256")}
            known = self.records.add({"kind": "reference", **key, **seen})
        telling(known, cell.name)
        return known

    def bucket(self, cell: Cell, where: Place) -> float:
        """The bucket size that suits DDP best in a cell, in MB: a few steps with each size, in
        turn.
        """
        key = {"cell": cell.name, "steps": cell.steps, "seed": self.seed}
        known = self.records.find("buckets", **key)
        if known is None:
            warm, timed = trial(cell, self.cores)
            few = ("--warm", str(warm), "--steps", str(timed))
            sizes = ("--try-buckets", *map(str, SIZES_MB))
            deadline = 120 + 6 * trial_seconds(cell, self.cores)
            answers = launch(
                PEERS["ddp"], where, (*self._arguments(cell), *few, *sizes), deadline=deadline
            )
            tried = {size: seconds * 1.0 for size, seconds in answers[0].items()}
            known = self.records.add(
                {
                    "kind": "buckets",
                    **key,
                    "tried": tried,
                    "best": float(min(tried, key=lambda size: tried[size])),
                }
            )
            self.say(f"{cell.name}  DDP's best bucket size: {known['best']:g} MB")
        return float(known["best"])

    def _arguments(self, cell: Cell) -> tuple[str, ...]:
        flags = {
            "--model": cell.model.name,
            "--workers": cell.setting.workers,
            "--steps": cell.steps,
            "--warm": WARM,
            "--seed": self.seed,
            "--digits": environments.DIGITS,
        }
        return tuple(word for flag, value in flags.items() for word in (flag, str(value)))

    def _patience(self, cell: Cell) -> float:
        """Seconds after which a launch is given up: far more than any peer should need."""
        return 120 + 6 * launch_seconds(cell, self.cores)


def place_here() -> AbstractContextManager[Place]:
    """This machine, for a single process."""
    return place(Setting("reference", "one process", 1, 1))


def _code() -> str:
    """A hash of what a reference depends on besides its arguments."""
    texts = [
        environments.HERE / "programs" / "workload.py",
        environments.ROOT / "paceline" / "apps" / "gpt.py",
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()[:12]


def _weights(key: Record) -> Path:
    return (
        REFERENCES
        / f"{key['model']}-{key['workers']}x{key['steps']}-{key['seed']}-{key['code']}.pt"
    )
