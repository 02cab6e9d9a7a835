"""docs/benchmarks.md and its pictures, from a summary: all tables, what was won and what was
lost, and how it was made.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import duration
from benchmarks.peers import environments, summary
from benchmarks.peers.catalogue import EXACT, HALF, MODELS, PEERS, ROUNDED, SETTINGS, WARM
from benchmarks.peers.environments import InstallError
from benchmarks.peers.summary import OURS

Row = dict[str, Any]
LEVEL = 0.02  # within so much of paceline's time a peer counts as equal
ALONE = """"One process alone" has the whole global batch on one core, and nothing to exchange. Below 1 it takes less time
than all the workers with paceline do: the model computes too little for what it exchanges on that link, and more workers are no use there
(larger batches, [fewer bytes](sending-less.md) or fewer exchanges are). In a lab all hosts share the cores of one machine: four
workers compute at most twice as fast as one there."""  # noqa: E501


def make(results: Path, docs: Path) -> None:
    """Write the page, its data and its pictures into `docs`."""
    found = summary.read(results)
    if not found["cells"]:
        sys.exit(f"{results} has no rounds: measure first, with python -m benchmarks.peers")
    (docs / "pictures").mkdir(parents=True, exist_ok=True)
    data = docs / "pictures" / "benchmarks.json"
    summary.write(data, found)
    try:
        if not environments.made("pictures"):
            environments.make("pictures")
    except InstallError as error:
        sys.exit(f"the pictures need matplotlib, and it can't be installed: {error}")
    program = environments.HERE / "programs" / "draw_pictures.py"
    subprocess.run(
        [str(environments.python_of("pictures")), str(program), str(data), str(data.parent)],
        check=True,
    )
    (docs / "benchmarks.md").write_text(text(found))
    print(f"written: {docs / 'benchmarks.md'} and {data.parent}")


def text(found: dict[str, Any]) -> str:
    """The page."""
    parts = [_head(found), _verdicts(found)]
    for setting in dict.fromkeys(cell["setting"] for cell in found["cells"]):
        parts.append(
            f"## {_sentence(SETTINGS[setting].title)}\n\n![Step "
            f"times]({Path('pictures') / f'{setting}.png'})"
        )
        parts += [_cell(cell) for cell in found["cells"] if cell["setting"] == setting]
    parts.append(_foot(found))
    return "\n\n".join(parts) + "\n"


def table(cell: dict[str, Any]) -> str:
    """The rows of a cell in Markdown: those with a time by their medians, then those without,
    with the reason.
    """
    lines = [
        (
            "| | step, median | quartiles | step / paceline's [90 %] | sent in a step | weights "
            "off by |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    timed = sorted(
        (row for row in cell["rows"] if row["median"] is not None),
        key=lambda row: float(row["median"]),
    )
    for row in timed:
        name = f"**{row['title']}**" if row["peer"] == OURS else row["title"]
        name += f" ({row['bucket']:g} MB)" if row.get("bucket") else ""
        several = row["rounds"] > 1
        spread = f"{duration(row['low'])} to {duration(row['high'])}" if several else "one round"
        bounds = (
            f" [{row['ratio']['low']:.2f}, {row['ratio']['high']:.2f}]"
            if row["ratio"] and several
            else ""
        )
        against = (
            f"{row['ratio']['value']:.2f}{bounds}"
            if row["ratio"]
            else "1"
            if row["peer"] == OURS
            else ""
        )
        lines.append(
            f"| {name} | {duration(row['median'])} | {spread} | {against} | "
            f"{row['sent'] / 1e6:.2f} MB | {row['away']:.1e} |"
        )
    lines += [
        f"| {row['title']} | no time: {_cell_text(row['why'])} | | | | |"
        for row in cell["rows"]
        if row["median"] is None
    ]
    return "\n".join(lines)


def rivals(cell: dict[str, Any]) -> list[Row]:
    """The rows that paceline is compared with: all but itself and the single process."""
    return [
        row
        for row in cell["rows"]
        if row["ratio"] is not None and row["peer"] not in (OURS, "none")
    ]


def alone(cell: dict[str, Any]) -> str:
    """The step of one process that has the whole batch, in multiples of paceline's; said loudly
    where it is the quicker one.
    """
    row = next(
        (row for row in cell["rows"] if row["peer"] == "none" and row["median"] is not None), None
    )
    if row is None:
        return "-"
    if row["ratio"] is None:
        return duration(row["median"])
    value = float(row["ratio"]["value"])
    return f"{value:.2f}x ({duration(row['median'])})" + (
        ": **quicker than all workers together**" if value < 1 - LEVEL else ""
    )


def _head(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    batches = "; ".join(f"{model.batch} of the {model.title}" for model in MODELS.values())
    return f"""# Benchmarks against peers

<!-- Made by `python -m benchmarks.peers report`; changes by hand are lost. -->

Every peer trains the same model on the same data, with the same global batch, seeds and optimizer (SGD), in float32. Peers take turns
round by round, each round is a launch of its own ({WARM} steps to warm up, then the timed ones), and the peer that begins rotates. The
tables have the median over rounds of a launch's mean step, the slowest worker's; quartiles over rounds; and the ratio of medians to
paceline's with a 90 % bootstrap interval over rounds. **Above 1, paceline is faster.**

**Each launch is checked**: as many workers as asked for, in one job, and the weights of one process that was given the whole global
batch: within {EXACT:g} of their norm after the warm-up, and after the last step within {ROUNDED:g} of what a worker is off that never
exchanged, as rounding grows at the kinks of ReLU. Peers that are inexact by design are held to less: gradients in half precision to
{HALF:g}; PowerSGD and local SGD to equal weights on all workers, nearer to the reference than those of a worker that never exchanged.
A peer that fails has no time.

- Machine: {machine["processor"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB, {machine["system"]}. One thread in each process.
- Versions: {", ".join(f"{name} {version}" for name, version in versions.items() if version)}; the peers' are at the end.
- Samples of a step for each worker: {batches}.
- Hosts are network namespaces of a [lab](lab.md) on this one machine, with links limited in both directions: their workers share its cores,
  so where workers outnumber cores, compute takes turns and little of an exchange can hide behind it.
- "Sent" is what left the network interfaces of all hosts, headers included; on one host what went over loopback (shared memory sends
  nothing).
- paceline's loop has `run.log(loss=...)` in it, as its README has; the others have no equivalent.
- Measured {found["when"]} with `{found["command"]}`."""  # noqa: E501


def _verdicts(found: dict[str, Any]) -> str:
    """Where paceline wins, draws and loses, cell by cell."""
    lines = [
        "## Wins and losses",
        "",
        ALONE,
        "",
        "| | faster than | about equal to (2 %) | slower than | one process alone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for cell in found["cells"]:
        groups: dict[str, list[str]] = {"won": [], "equal": [], "lost": []}
        for row in sorted(rivals(cell), key=lambda row: -float(row["ratio"]["value"])):
            value = row["ratio"]["value"]
            group = "won" if value > 1 + LEVEL else "lost" if value < 1 - LEVEL else "equal"
            groups[group].append(f"{row['title']} ({value:.2f}x)")
        what = f"{SETTINGS[cell['setting']].title}; {MODELS[cell['model']].title}"
        ours = next((row for row in cell["rows"] if row["peer"] == OURS), None)
        if ours is None or ours["median"] is None:
            lines.append(f"| {what} | paceline has no time here | | | {alone(cell)} |")
        else:
            lines.append(
                f"| {what} | {' | '.join('; '.join(group) or '-' for group in groups.values())} | "
                f"{alone(cell)} |"
            )
    return "\n".join(lines)


def _cell(cell: dict[str, Any]) -> str:
    counts = sorted({row["rounds"] for row in cell["rows"] if row["median"] is not None})
    rounds = (
        " to ".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
        if counts
        else "no"
    )
    words = [
        f"{cell['steps']} timed steps in each launch, {rounds} round{'' if rounds == '1' else 's'}."
    ]
    if cell["reference"] is not None:
        words.append(f"A worker that never exchanges ends {cell['reference']['alone']:.1e} off.")
    if cell["buckets_ms"] is not None:
        tried = ", ".join(
            f"{float(size):g} MB {duration(ms / 1e3)}" for size, ms in cell["buckets_ms"].items()
        )
        words.append(f"DDP's step with buckets of {tried}.")
    if cell["unmeasured"]:
        words.append(
            f"Not measured: {', '.join(PEERS[name].title for name in cell['unmeasured'])}."
        )
    return (
        f"### {MODELS[cell['model']].title}; "
        f"{SETTINGS[cell['setting']].title}\n\n{table(cell)}\n\n{' '.join(words)}"
    )


def _foot(found: dict[str, Any]) -> str:
    """The peers: version, launcher, what they are held to."""
    lines = [
        "## The peers",
        "",
        "| | version | started by | weights | |",
        "| --- | --- | --- | --- | --- |",
        *_peers(found),
    ]
    runs = [f"- {run['when']}: `{run['command']}`" for run in found["runs"]]
    again = """## To measure again

<!-- not run: measures for minutes -->
```console
$ python -m benchmarks.peers --install --estimate    # the peers' environments, and how long it would take
$ make bench-peers                                   # measure (or go on), then write this page
```

Each program is a file in `benchmarks/peers/programs/`; `benchmarks/README.md` says more. The numbers, every round's included, are in
`docs/pictures/benchmarks.json`. They were measured in these runs, each of which went on where the one before had ended:
"""  # noqa: E501
    return "\n".join(lines) + "\n\n" + again + "\n" + "\n".join(runs)


def _peers(found: dict[str, Any]) -> Iterator[str]:
    for name, peer in PEERS.items():
        rows = [row for cell in found["cells"] for row in cell["rows"] if row["peer"] == name]
        if not rows:
            continue
        versions: dict[str, str] = next(
            (row["versions"] for row in rows if row.get("versions")), {}
        )
        version = ", ".join(
            f"{package} {number}"
            for package, number in versions.items()
            if package != "torch" or len(versions) == 1
        )
        how = {"alone": "python", "torchft": "torchrun for each worker, and a lighthouse"}.get(
            peer.launcher, peer.launcher
        )
        across = (
            ", which reaches the other hosts by ssh"
            if peer.launcher in ("mpirun", "horovodrun")
            else ""
        )
        yield f"| {peer.title} | {version} | {how}{across} | {rows[0]['check']} | {peer.note} |"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _cell_text(why: str) -> str:
    """A reason as it can stand in a table."""
    return re.sub(r"([|\[\]])", r"\\\1", why).replace("<", "&lt;")
