"""Counts the lines that change when scripts of pytorch/examples go to paceline and its peers.

    git clone https://github.com/pytorch/examples
    python benchmarks/port_cost.py --checkout examples [--run]

`benchmarks/ports` has a patch for each script and library: the changed lines alone. Each is applied
to the script of the checkout, and the result has to compile. With `--run` it also trains with two
workers on made-up data. What counts are the lines that `diff` adds and removes.

All ports of a script do the same, in the fewest lines that are usual for the library:

- The batch of a step is that of the script, of all workers together.
- The figures of the test are those of the whole test set.
- The first worker saves the model, without names that the library adds.
- Progress and pictures are left as they are: each worker prints and draws.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PORTS = HERE / "ports"
PEERS = ("paceline", "accelerate", "fabric")
# Scripts and the arguments of a short run.
SCRIPTS = {
    "mnist": "--epochs 1 --batch-size 32 --test-batch-size 64 --no-accel --save-model",
    "mnist_rnn": "--epochs 1 --batch-size 32 --test-batch-size 64 --save-model",
    "vae": "--epochs 1 --batch-size 32 --no-accel",
    "siamese_network": ("--epochs 1 --batch-size 32 --test-batch-size 64 --no-accel --save-model"),
    "dcgan": "--dataset fake --imageSize 64 --ngf 4 --ndf 4 --niter 1 --batchSize 32 --workers 0",
    "regression": "",
}
LAUNCHERS = {
    "paceline": ("-m", "paceline", "run", "--workers", "2"),
    "accelerate": (
        *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    ),
    "fabric": (
        *("-m", "lightning.fabric.cli", "--accelerator", "cpu"),
        *("--devices", "2", "--strategy", "ddp"),
    ),
}
RUN_SECONDS = 300  # after which a run has failed


class Port(NamedTuple):
    """A ported script: its text, and the number of lines that were added and removed."""

    text: str
    changed: int


def read_script(checkout: Path, name: str) -> str:
    """Read a script of pytorch/examples, from a folder or a git directory without files."""
    path = checkout / name / "main.py"
    if path.exists():
        return path.read_text()
    shown = subprocess.run(
        ["git", "-C", str(checkout), "show", f"HEAD:{name}/main.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout


def apply_patch(script: str, name: str, peer: str) -> Port:
    """Apply the patch of a port to a script, and count what has changed.

    Raises `subprocess.CalledProcessError` if the patch doesn't fit.
    """
    patch = PORTS / f"{name}.{peer}.patch"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name / "main.py"
        path.parent.mkdir()
        path.write_text(script)
        command = ["git", "apply", "--unidiff-zero", "--whitespace=nowarn", str(patch)]
        # Without a repository around, git applies a patch to plain files.
        environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(path.parents[2])}
        subprocess.run(command, cwd=folder, env=environ, check=True)
        ported = path.read_text()
    return Port(ported, count_changes(script, ported))


def count_changes(before: str, after: str) -> int:
    """Count the lines that `diff` adds and removes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "before", Path(folder) / "after"]
        paths[0].write_text(before)
        paths[1].write_text(after)
        lines = subprocess.run(
            ["diff", *map(str, paths)], capture_output=True, text=True, check=False
        ).stdout.splitlines()
    return sum(line[:1] in ("<", ">") for line in lines)


def run_port(text: str, name: str, peer: str) -> None:
    """Run a ported script with two workers on made-up data.

    Raises `subprocess.CalledProcessError` if it fails, and `TimeoutExpired` if it doesn't end.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text(text)
        (Path(folder) / "results").mkdir()
        paths = [str(PORTS / "stand_ins"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, *LAUNCHERS[peer], "main.py", *SCRIPTS[name].split()]
        subprocess.run(
            command,
            cwd=folder,
            env={"OMP_NUM_THREADS": "1", **environ},
            check=True,
            timeout=RUN_SECONDS,
            capture_output=True,
        )


def make_table(changed: Mapping[str, Mapping[str, int]]) -> str:
    """Make a table in Markdown: a row for each script, and the sums.

    Args:
        changed: Changed lines by script and library.
    """
    rows = ["| script | paceline | Accelerate | Fabric |", "| --- | --- | --- | --- |"]
    totals = {peer: sum(counts[peer] for counts in changed.values()) for peer in PEERS}
    for name, counts in {**changed, "all": totals}.items():
        rows.append(f"| {name} | {' | '.join(str(counts[peer]) for peer in PEERS)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Apply all ports, run them if asked to, and print the table."""
    summary = (__doc__ or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--checkout", type=Path, required=True, help="of pytorch/examples")
    parser.add_argument("--run", action="store_true", help="train with two workers as well")
    options = parser.parse_args(arguments)
    changed: dict[str, dict[str, int]] = {}
    for name in SCRIPTS:
        script = read_script(options.checkout, name)
        ports = {peer: apply_patch(script, name, peer) for peer in PEERS}
        changed[name] = {peer: port.changed for peer, port in ports.items()}
        for peer, port in ports.items():
            compile(port.text, f"{name}.{peer}", "exec")
        for peer, port in ports.items() if options.run else ():
            try:
                run_port(port.text, name, peer)
            except subprocess.CalledProcessError as error:
                sys.exit(f"{name} of {peer}: {error.stdout.decode()}\n{error.stderr.decode()}")
            print(f"{name} runs with two workers of {peer}", file=sys.stderr)
    print(make_table(changed))


if __name__ == "__main__":
    main()
