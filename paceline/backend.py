"""paceline as a backend of torch.distributed.

    dist.init_process_group("paceline")        torch knows the name once paceline is installed
    dist.init_process_group("paceline", init_method="paceline://")    started by Slurm or MPI

    import paceline.backend                    registers the backend if entry points aren't loaded

A script can stay as it is. It then gets paceline whenever it asks for Gloo:

    python -m paceline.backend train.py
    torchrun ... -m paceline.backend train.py        and srun, and mpirun
    paceline run --backend paceline train.py

DDP, fully_shard, DTensor and everything else on top of torch.distributed then exchange CPU tensors
through paceline's groups: through shared memory inside a host, and with one copy per host between
hosts. Start the script with torchrun, `paceline run`, Slurm or MPI, or pass ranks of your own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.session.gloo_replacement import (
    announce_programs,
    replace_gloo,
    set_torch_variables,
    use_cpu_in_accelerate,
)
from paceline.session.registration import register


def main(arguments: list[str]) -> None:
    """Run a script as Python would, with this backend in place of Gloo."""
    if not arguments:
        raise SystemExit("usage: python -m paceline.backend SCRIPT [ARGUMENTS]")
    set_torch_variables()
    replace_gloo()
    announce_programs()
    use_cpu_in_accelerate()
    sys.argv[:] = arguments
    # As `python SCRIPT` does: modules next to the script can be imported.
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


register()
if __name__ == "__main__":
    main(sys.argv[1:])
