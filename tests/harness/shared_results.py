"""Results that several tests compare with: each is made once, by whichever process of the tests
asks first, and read by the others.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def shared_folder(base: Path) -> Path:
    """The folder that all processes of this run of the tests have, of which `base` is this one's
    own for temporary files.
    """
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(path: Path, make: Callable[[], Any]) -> Any:
    """What is in the file, which begins with what `make` gives; who comes meanwhile waits."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = pickle.dumps(make())  # nothing is there where it raises
            path.write_bytes(made)
    return pickle.loads(path.read_bytes())
