"""Horovod's calls for TensorFlow on paceline's groups. See docs/bridges/tensorflow.md.

>>> import paceline.bridges.horovod.tensorflow as hvd
>>> hvd.init()
>>> tape = hvd.DistributedGradientTape(tape)
"""

from paceline.bridges.foreign import TestedLibrary

TestedLibrary(
    "tensorflow", (2, 21), (2, 21), builds=("tensorflow-cpu",)
).check_version()  # before a module imports it

from paceline.bridges.horovod.common.basics import (  # noqa: E402
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from paceline.bridges.horovod.common.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from paceline.bridges.horovod.tensorflow.compression import TensorCompression as Compression  # noqa: E402
from paceline.bridges.horovod.tensorflow.gradients import (  # noqa: E402
    DistributedGradientTape,
    DistributedOptimizer,
)
from paceline.bridges.horovod.tensorflow.operations import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_variables,
    grouped_allreduce,
)
from paceline.bridges.horovod.torch.functions import (  # noqa: E402
    allgather_object,
    broadcast_object,
)
from paceline.bridges.horovod.torch.mpi_ops import (  # noqa: E402
    Average,
    Max,
    Min,
    Product,
    Sum,
    barrier,
    join,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
