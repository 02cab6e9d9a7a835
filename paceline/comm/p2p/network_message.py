"""A message as it travels over a network: its pieces for the sender, its tensors for the receiver.

    length of the header (4 bytes) | header | tensor | tensor ...

Each tensor begins on a cache line, in the message and in memory, so tensors are used where they
arrive.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.comm.p2p.lent_memory import (
    COPIED,
    LINE,
    lay_out_tensors,
    lend_buffer,
    view_tensor,
)
from paceline.comm.p2p.pair_message import LONGEST, PairMessage, unpack_header
from paceline.comm.p2p.socket_mesh import ArrivedMessage, give_back
from paceline.comm.shm.window_messages import is_plain
from paceline.comm.wire_format import MalformedMessage
from paceline.native.functions import address_of_bytes
from paceline.state.snapshot import view_cpu_bytes

LENGTH = struct.Struct("<I")
_FILL = ctypes.create_string_buffer(LINE)  # zeros in front of a tensor
_FILL_ADDRESS = ctypes.addressof(_FILL)


class OutgoingMessage(NamedTuple):
    """A message to send."""

    pieces: list[tuple[int, int]]  # address and bytes of each piece
    nbytes: int
    memory: list[object]  # objects that own the pieces


def make_message(header: bytes, tensors: Sequence[Tensor]) -> OutgoingMessage:
    """Make a message. Tensors are copied only if their bytes can't be sent from where they are."""
    start = LENGTH.pack(len(header)) + header
    at = len(start)
    # The address of `start` itself: nothing writes to it, and a copy would cost more.
    pieces, memory = [(address_of_bytes(start), at)], list[object]([start])
    for x in tensors:
        if not (x.device.type == "cpu" and is_plain(x)):
            x = view_cpu_bytes(x)
        nbytes, gap = x.nbytes, -at % LINE
        if gap:
            pieces.append((_FILL_ADDRESS, gap))
        if nbytes:
            pieces.append((x.data_ptr(), nbytes))
            memory.append(x)
        at += gap + nbytes
    return OutgoingMessage(pieces, at, memory)


def read_message(arrived: ArrivedMessage) -> tuple[int, PairMessage]:
    """Read the lane and the tensors of a message. Large tensors stay in its memory.

    The memory goes back to the mesh: at once, or with the last tensor that lies in it.

    Raises:
        MalformedMessage: No worker can have sent it.
    """
    address, nbytes = arrived.address, arrived.nbytes
    memory = lend_buffer(address, nbytes, give_back, address)
    header_length = LENGTH.unpack_from(memory)[0] if nbytes >= LENGTH.size else LONGEST + 1
    if header_length > min(LONGEST, nbytes - LENGTH.size):
        raise MalformedMessage("the bytes received are no message")
    header = unpack_header(ctypes.string_at(address + LENGTH.size, header_length))
    layout = header.layout
    places, total = lay_out_tensors(LENGTH.size + header_length, layout.lengths)
    if total != nbytes:
        raise MalformedMessage(f"a message of {nbytes} bytes describes tensors of {total} bytes")
    tensors = tuple(
        view_tensor(memory, at, length, *form, alone=nbytes <= COPIED)
        for at, length, form in zip(places, layout.lengths, layout.forms, strict=True)
    )
    return header.lane, PairMessage(header.head, tensors)
