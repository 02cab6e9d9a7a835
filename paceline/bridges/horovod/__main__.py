"""Runs a script in which `import horovod` finds the bridge.

paceline run --horovod train.py
torchrun ... -m paceline.bridges.horovod train.py        and srun, and mpirun
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.bridges.horovod.common.place import stand_for_horovod


def main(arguments: list[str]) -> None:
    """Run a script as Python would, with the bridge in place of Horovod."""
    if not arguments:
        raise SystemExit("usage: python -m paceline.bridges.horovod SCRIPT [ARGUMENTS]")
    sys.argv[:] = arguments
    # As `python SCRIPT` does: modules next to the script can be imported.
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    stand_for_horovod()
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
