"""Horovod's calls for Keras on TensorFlow. See docs/bridges/tensorflow.md.

>>> import paceline.bridges.horovod.tensorflow.keras as hvd
>>> hvd.init()
>>> model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
"""

from paceline.bridges.horovod.tensorflow import (
    Average,
    Compression,
    DistributedOptimizer,
    ProcessSet,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    broadcast,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from paceline.bridges.horovod.tensorflow.keras import callbacks

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "callbacks",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
