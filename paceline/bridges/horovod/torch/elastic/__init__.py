"""Training that goes on when workers die or come: `hvd.elastic`."""

from __future__ import annotations

from paceline.bridges.horovod.common.elastic import run
from paceline.bridges.horovod.torch.elastic.sampler import ElasticSampler
from paceline.bridges.horovod.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "TorchState", "run"]
