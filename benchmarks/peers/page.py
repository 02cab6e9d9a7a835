"""The peers' part of docs/results.md, from a summary: every cell beside its peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import duration
from benchmarks.parts import write_part
from benchmarks.peers import summary
from benchmarks.peers.catalogue import EXACT, HALF, MODELS, PEERS, SETTINGS, WARM
from benchmarks.peers.summary import OURS

Row = dict[str, Any]
LEVEL = 0.02  # within so much of paceline's time a peer counts as equal
ALONE = "none"  # one process that has the whole batch
SHORT = {  # titles of columns; peers that aren't here have no column
    "ddp": "DDP",
    "ddp-best": "DDP, best buckets",
    "ddp-fp16": "DDP, fp16 hook",
    "ddp-powersgd-1": "DDP, PowerSGD",
    "post-local-sgd": "DDP, local SGD",
    "accelerate": "Accelerate",
    "fabric": "Fabric",
    "deepspeed": "DeepSpeed ZeRO-1",
    "horovod": "Horovod",
    "torchft": "torchft",
    "hivemind": "hivemind",
    "mpi": "MPI by hand",
    ALONE: "one process alone",
}


def make(results: Path, docs: Path) -> None:
    """Write the part of the page, and the data behind it, into `docs`."""
    found = summary.read(results)
    if not found["cells"]:
        sys.exit(f"{results} has no rounds: measure first, with python -m benchmarks.peers")
    (docs / "pictures").mkdir(parents=True, exist_ok=True)
    data = docs / "pictures" / "benchmarks.json"
    summary.write(data, found)
    page = write_part(docs, "peers", "python -m benchmarks.peers report", text(found))
    print(f"written: {page} and {data}")


def text(found: dict[str, Any]) -> str:
    """The part: what was done, the table, and the versions."""
    machine, versions = found["machine"], found["versions"]
    batches = "; ".join(f"{model.batch} of the {model.title}" for model in MODELS.values())
    main = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"""## A training step, beside its peers

All systems train the same model on the same data, with the same global batch, seeds and optimizer
(SGD), in float32. Each
round is a launch of its own ({WARM} steps to warm up, then the timed steps), and the systems take
turns. The table has paceline's
median step, and each peer's step in multiples of it. **Above 1, paceline is faster.** A dash:
there is no valid time.

Each launch is checked. The job must have as many workers as asked for, and their weights must be
those of one process that
was given the whole batch: within {EXACT:g} of their norm, or within {HALF:g} with gradients in
half precision. PowerSGD and local SGD
must have equal weights on all workers, nearer to that process than those of a worker that never
exchanged.

{table(found["cells"])}

"One process alone" has the whole batch on one core, and nothing to exchange. **Bold: it is faster
than all workers together.**
Hosts are those of a [lab](lab.md): their workers share the cores of one machine, so four workers
compute at most twice as fast
as one. paceline's loop has `run.log(loss=...)` in it; the loops of the others have no equivalent.

- Machine: {machine["processor"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB. One
  thread in each process.
- Versions: {main}; {_peer_versions(found)}.
- Samples of a step for each worker: {batches}.
- Every round, the bytes sent and the distances of the weights are in
  `docs/pictures/benchmarks.json`. Last measured
  {found["when"][:10]}; `make bench-peers` measures again."""


def table(cells: list[dict[str, Any]]) -> str:
    """A row for each cell: paceline's step, and those of the peers in multiples of it."""
    timed = {row["peer"] for cell in cells for row in cell["rows"] if row["median"] is not None}
    columns = [peer for peer in SHORT if peer in timed]
    lines = [
        f"| | paceline | {' | '.join(SHORT[peer] for peer in columns)} |",
        f"| --- | ---: |{' ---: |' * len(columns)}",
    ]
    for cell in cells:
        rows = {row["peer"]: row for row in cell["rows"]}
        ours = rows.get(OURS)
        step = "no time" if ours is None or ours["median"] is None else duration(ours["median"])
        name = f"{MODELS[cell['model']].title}; {SETTINGS[cell['setting']].title}"
        lines.append(
            f"| {name} | {step} | {' | '.join(_ratio(rows.get(peer)) for peer in columns)} |"
        )
    return "\n".join(lines)


def _ratio(row: Row | None) -> str:
    """A peer's step in multiples of paceline's; bold for one process that is faster than all
    workers together.
    """
    if row is None or row["median"] is None:
        return "-"
    if row["ratio"] is None:
        return duration(row["median"])
    value = float(row["ratio"]["value"])
    return f"**{value:.2f}**" if row["peer"] == ALONE and value < 1 - LEVEL else f"{value:.2f}"


def _peer_versions(found: dict[str, Any]) -> str:
    """The versions of the peers that are packages of their own."""
    rows = [row for cell in found["cells"] for row in cell["rows"]]
    versions: dict[str, str] = {}
    for peer in PEERS:
        own = next(
            (row["versions"] for row in rows if row["peer"] == peer and row.get("versions")), {}
        )
        versions |= {name: own[name] for name in own if name not in ("torch", OURS)}
    return ", ".join(f"{name} {version}" for name, version in versions.items())
