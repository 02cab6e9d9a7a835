"""Read by any Python that has this folder in PYTHONPATH, before all else: its first `import torch`
begins with tests.harness.brisk.

All programs that tests start have it there (tests/conftest.py): those of ours, kernels of
notebooks, launchers of others and their workers. Those that need no torch get none.
"""

from __future__ import annotations

import builtins
import sys

_import = builtins.__import__


def _first(name: str, *where: object, **more: object) -> object:
    """Import as ever, but torch as `brisk` does it."""
    if name.partition(".")[0] == "torch":
        builtins.__import__ = _import
        # or `brisk` is what imports torch, under whatever name
        if "torch._meta_registrations" not in sys.modules:
            _import("tests.harness.brisk")
    return _import(name, *where, **more)  # type: ignore[arg-type]


builtins.__import__ = _first  # type: ignore[assignment]
