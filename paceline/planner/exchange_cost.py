"""What exchanges cost, in seconds of processors and of links: the constants, and sums of them.

The constants were fitted on this project's lab (two cores of an Intel Xeon, Linux 6, torch 2.13, in
November 2026). `ledger` corrects them by what a user's own runs took.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.comm.schedule import LinkSpeed

# Bytes read and written for each byte of a gradient.
SCALE_TRAFFIC: Final = 2.0  # into its bucket, times its weight
SUM_TRAFFIC: Final = 2.0  # the sum inside a host, on each worker
HAND_OUT_TRAFFIC: Final = 2.0  # from the leader of a host to another worker
GATHER_TRAFFIC: Final = 8.0  # gathering parameters that each worker has stepped a part of
ACCUMULATE_TRAFFIC: Final = 3.0  # a micro-batch's gradients are added to those before
ROUND_TRAFFIC: Final = 6.0  # a round of local SGD: changes are made, and the mean is applied

# Seconds on the processor.
GRADIENT_SECONDS: Final = 5e-6  # for each parameter: hooks, and its place in a bucket
BUCKET_SECONDS: Final = 60e-6  # for each bucket inside a host
CROSSING_SECONDS: Final = 150e-6  # for each bucket between hosts, on the leader
STEP_SECONDS: Final = 250e-6  # for each step with several workers: turns, and the agreement
SHARD_SECONDS: Final = 300e-6  # for each step in which parameters are gathered
WIRE_SECONDS: Final = 0.45e-9  # for each byte that a leader sends or receives over TCP
ACTION_SECONDS: Final = 150e-6  # for each action of a pipeline: its message, and bookkeeping
CODE_SECONDS: Final = 0.12e-9  # for each byte of float32 that int8 encodes, sums and decodes

INT8_RATIO: Final = 3.94  # bytes of float32 for each byte on the wire, scales included


# Messages between two stages of a pipeline inside a host.
STAGE_LINK: Final = LinkSpeed(100e-6, 2e9)
SPLIT_SCHEDULES: Final = ("zero-bubble", "zbv")  # schedules that halve a backward


@dataclass(frozen=True)
class WireCodec:
    """How gradients are written between hosts.

    Attributes:
        name: As in `--sync`. Empty: exact.
        ratio: Bytes of float32 for each byte on the wire.
        seconds_per_byte: Seconds of a processor for each byte of float32.
    """

    name: str = ""
    ratio: float = 1.0
    seconds_per_byte: float = 0.0


EXACT: Final = WireCodec()
INT8: Final = WireCodec("int8()", INT8_RATIO, CODE_SECONDS)
