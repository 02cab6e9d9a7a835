"""What starting costs: `import paceline; paceline.start` against `import torch`, and `paceline
--help`, which must not import torch.

python benchmarks/startup.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import ONE_THREAD, Row, arguments, bootstrap, interleave, ratio, report

SHOW = (
    "import sys; from paceline.cli import main; sys.argv = ['paceline', '--help']\ntry: "
    "main()\nexcept SystemExit: pass\n"
)
HELP_SECONDS = 0.4
BESIDE = Path(sys.executable).parent
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "paceline.start": [sys.executable, "-c", "import paceline; paceline.start"],
    "paceline --help": [str(BESIDE / "paceline"), "--help"],
}


def timing(command: Sequence[str]) -> Callable[[], float]:
    """Wall-clock seconds of one process."""

    def run() -> float:
        start = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **ONE_THREAD}
        )
        return time.perf_counter() - start

    return run


def main() -> None:
    options = arguments(__doc__ or "", "startup", rounds=20).parse_args()
    check = SHOW + "if 'torch' in sys.modules: sys.exit('paceline --help imports torch')\n"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL)
    samples = interleave(
        {name: timing(command) for name, command in COMMANDS.items()}, options.rounds
    )
    medians = {name: statistics.median(s) for name, s in samples.items()}
    both = {name: medians[name] for name in ("import torch", "paceline.start")}
    rows = [
        Row(
            "start",
            both,
            "paceline.start / import torch",
            ratio(samples["paceline.start"], samples["import torch"]),
            most=1.15,
        ),
        Row(
            "help",
            {"paceline --help": medians["paceline --help"]},
            "seconds",
            bootstrap(float, samples["paceline --help"]),
            most=HELP_SECONDS,
        ),
    ]
    if not report("startup", rows, options, samples) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
