"""paceline: train one PyTorch model on many processes, hosts and devices.

The names below are imported when they are first used, so that `import paceline` doesn't import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import (
    CheckpointError,
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    ResourceError,
    UsageError,
    WorkerLost,
)

if TYPE_CHECKING:
    from paceline.session.run import Run
    from paceline.session.start import start
    from paceline.sync.allreduce import AllReduce

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "CheckpointError",
    "DeadlineExceeded",
    "Mismatch",
    "PacelineError",
    "ResourceError",
    "Run",
    "UsageError",
    "WorkerLost",
    "__version__",
    "start",
]

_HOMES: Final = {
    "AllReduce": "paceline.sync.allreduce",
    "Run": "paceline.session.run",
    "start": "paceline.session.start",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use doesn't come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
