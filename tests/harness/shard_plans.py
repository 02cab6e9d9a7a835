"""The plan of a small server, and how it is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.codec.dense import int8
from paceline.codec.sparse import topk
from paceline.comm.bucket_layout import BucketShape
from paceline.servers.process.codings import CodingPhase
from paceline.servers.process.partition import RowRange
from paceline.servers.process.shard import ShardPlan
from paceline.servers.protocol.plans import pack_plan
from tests.harness.jobs import PATIENCE

# codings of two buckets
WAYS = [(CodingPhase(0, topk(0.5)),), (CodingPhase(0, None), CodingPhase(1, int8(8)))]
SECONDS = PATIENCE  # in which a server under test answers


def plan(rows: int = 4, ways: Any = ()) -> ShardPlan:
    shapes = [BucketShape.of_parameter(torch.empty(size)) for size in ((rows, 3), (5,))]
    pieces = [
        RowRange(number, 0, shape.size[0], shape, True) for number, shape in enumerate(shapes)
    ]
    return ShardPlan(
        pieces, [[1], [0]], [(0, 0), (0, 1)], [("SGD", [{"lr": 0.5}, {"lr": 0.25}])], [*ways]
    )


def packed(found: ShardPlan) -> Tensor:
    return torch.frombuffer(bytearray(pack_plan(found)), dtype=torch.uint8)
