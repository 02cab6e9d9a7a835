"""paceline as a backend of torch.distributed.

    dist.init_process_group("paceline")        torch knows the name wherever paceline is installed
    dist.init_process_group("paceline", init_method="paceline://")    started by Slurm or MPI

    import paceline.backend                    registers it if entry points aren't loaded

For a script that isn't touched: it gets paceline where it asks for Gloo.

    python -m paceline.backend train.py
    torchrun ... -m paceline.backend train.py        and srun, and mpirun
    paceline run --backend paceline train.py

DDP, fully_shard, DTensor and everything else on top of torch.distributed then exchange CPU tensors
by paceline's groups: through shared memory inside a host, one copy per host between hosts. Start it
by torchrun, `paceline run`, Slurm or MPI, or give ranks of your own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from paceline.session.gloo_replacement import replace_gloo, set_torch_variables
from paceline.session.registration import register


def main(arguments: list[str]) -> None:
    """Run a script as Python would, with this backend in the place of Gloo."""
    if not arguments:
        raise SystemExit("usage: python -m paceline.backend SCRIPT [ARGUMENTS]")
    set_torch_variables()
    replace_gloo()
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


register()
if __name__ == "__main__":
    main(sys.argv[1:])
