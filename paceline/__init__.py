"""paceline: train one PyTorch model on many processes, hosts and devices.

The names below are imported when they are first used, so that `import paceline` doesn't import
torch.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import (
    CheckpointError,
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    ReplicasDiffer,
    ResourceError,
    UsageError,
    WorkerFailed,
    WorkerLost,
)

if TYPE_CHECKING:
    from paceline.checkpoint.files.export import state_dict
    from paceline.codec.auto import auto
    from paceline.codec.codec import (
        after,
        error_feedback,
        gathered,
        named,
        scattered,
        smaller,
        where,
    )
    from paceline.codec.coding import compose, exact
    from paceline.codec.dense import bfloat16, half, int4, int8, sign
    from paceline.codec.powersgd import powersgd
    from paceline.codec.sparse import randomk, topk
    from paceline.data.batches import tokens
    from paceline.data.costs import padded
    from paceline.data.own_batches import own_batches
    from paceline.notebook.launch import launch
    from paceline.parallel.elementwise import elementwise
    from paceline.parallel.layers import layers
    from paceline.parallel.meta import meta
    from paceline.parallel.pipeline import pipeline
    from paceline.parallel.shard import shard
    from paceline.parallel.tensor.styles import column, row, sequence, summed, vocab
    from paceline.parallel.tensor.tensor_cut import tensor
    from paceline.planner.planning.plan import plan
    from paceline.record.logged.histogram import histogram
    from paceline.record.logged.image import image
    from paceline.servers.tables.embedding import SparseEmbedding
    from paceline.servers.worker.strategy import ParameterServer
    from paceline.session.cluster_probe import probe
    from paceline.session.load import load
    from paceline.session.run import Run
    from paceline.session.start import start
    from paceline.sync.allreduce import AllReduce
    from paceline.sync.gossip.strategy import Gossip
    from paceline.sync.localsgd.fragment import adaptive
    from paceline.sync.localsgd.outer import average, nesterov
    from paceline.sync.localsgd.strategy import LocalSGD
    from paceline.sync.per_axis import Sequence

__version__ = "0.2.0"

__all__ = [
    "AllReduce",
    "CheckpointError",
    "DeadlineExceeded",
    "Gossip",
    "LocalSGD",
    "Mismatch",
    "PacelineError",
    "ParameterServer",
    "ReplicasDiffer",
    "ResourceError",
    "Run",
    "Sequence",
    "SparseEmbedding",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "__version__",
    "adaptive",
    "after",
    "auto",
    "average",
    "bfloat16",
    "column",
    "compose",
    "elementwise",
    "error_feedback",
    "exact",
    "gathered",
    "half",
    "histogram",
    "image",
    "int4",
    "int8",
    "launch",
    "layers",
    "load",
    "meta",
    "named",
    "nesterov",
    "own_batches",
    "padded",
    "pipeline",
    "plan",
    "powersgd",
    "probe",
    "randomk",
    "row",
    "scattered",
    "sequence",
    "shard",
    "sign",
    "smaller",
    "start",
    "state_dict",
    "summed",
    "tensor",
    "tokens",
    "topk",
    "vocab",
    "where",
]

# Names that each module defines.
_NAMES_BY_MODULE: Final = {
    "paceline.codec.codec": (
        "after",
        "error_feedback",
        "gathered",
        "named",
        "scattered",
        "smaller",
        "where",
    ),
    "paceline.codec.coding": ("compose", "exact"),
    "paceline.codec.dense": ("bfloat16", "half", "int4", "int8", "sign"),
    "paceline.codec.powersgd": ("powersgd",),
    "paceline.codec.sparse": ("randomk", "topk"),
    "paceline.data.batches": ("tokens",),
    "paceline.data.costs": ("padded",),
    "paceline.data.own_batches": ("own_batches",),
    "paceline.parallel.elementwise": ("elementwise",),
    "paceline.planner.planning.plan": ("plan",),
    "paceline.servers.tables.embedding": ("SparseEmbedding",),
    "paceline.parallel.layers": ("layers",),
    "paceline.parallel.meta": ("meta",),
    "paceline.parallel.pipeline": ("pipeline",),
    "paceline.parallel.shard": ("shard",),
    "paceline.parallel.tensor.tensor_cut": ("tensor",),
    "paceline.parallel.tensor.styles": ("column", "row", "sequence", "summed", "vocab"),
    "paceline.checkpoint.files.export": ("state_dict",),
    "paceline.notebook.launch": ("launch",),
    "paceline.session.load": ("load",),
    "paceline.record.logged.histogram": ("histogram",),
    "paceline.record.logged.image": ("image",),
    "paceline.session.cluster_probe": ("probe",),
    "paceline.session.run": ("Run",),
    "paceline.session.start": ("start",),
    "paceline.sync.allreduce": ("AllReduce",),
    "paceline.codec.auto": ("auto",),
    "paceline.servers.worker.strategy": ("ParameterServer",),
    "paceline.sync.gossip.strategy": ("Gossip",),
    "paceline.sync.localsgd.strategy": ("LocalSGD",),
    "paceline.sync.localsgd.fragment": ("adaptive",),
    "paceline.sync.localsgd.outer": ("average", "nesterov"),
    "paceline.sync.per_axis": ("Sequence",),
}
# Module of each name.
_MODULE_BY_NAME: Final = {
    name: module for module, names in _NAMES_BY_MODULE.items() for name in names
}


# Hidden from type checkers: with it, they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(
                f"module 'paceline' has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        value = getattr(_import_quickly(_MODULE_BY_NAME[name]), name)
        # The next use of the name finds it here, and doesn't call this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _import_quickly(module: str) -> Any:
    """Import a module with garbage collection paused, as a collection would visit all of torch.

    After the module of `start`, all objects that exist by then are left out of later collections
    too (`gc.freeze`), because the modules of torch stay until the end. A process then starts and
    ends in two thirds of the time. If the program has disabled collection, nothing is frozen.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        if was_enabled:
            if module == _MODULE_BY_NAME["start"]:
                gc.freeze()
            gc.enable()
