"""A state's bytes are laid out as safetensors wants them, and copied exactly, to memory that is
used again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.files import file_layout as images
from paceline.checkpoint.files.disk import PAGE_SIZE
from paceline.checkpoint.files.file_layout import (
    CopyMemory,
    FileLayout,
    lay_out_snapshot,
    unpack_layout,
)
from paceline.errors import CheckpointError
from paceline.state.snapshot import Snapshot, make_snapshot, restore_dtypes

KINDS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
KINDS += [torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]


def back(found: FileLayout) -> Snapshot:
    """The snapshot that a reader of the two files sees."""
    tree = json.loads(json.dumps(found.tree))
    data = b"".join(part.numpy().tobytes() for part in found.iterate_bytes())
    assert len(data) == found.nbytes
    return Snapshot(
        tree["version"], tree["tree"], restore_dtypes(safetensors.torch.load(data), tree["tensors"])
    )


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype and shape, in any order of its dims, with holes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    bits = torch.randint(
        0,
        2,
        (*[2 * size for size in shape],),
        generator=torch.Generator().manual_seed(draw(st.integers(0, 99))),
    )
    x = bits.to(draw(st.sampled_from(KINDS)))[tuple(slice(None, None, 2) for _ in shape)]
    x = x.permute(draw(st.permutations(range(len(shape)))))
    return x.conj() if x.is_complex() and draw(st.booleans()) else x


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.one_of(tensors(), st.integers(), st.text(max_size=3), st.lists(tensors(), max_size=3)),
    )
)
def test_any_state_comes_back(value: dict[str, Any]) -> None:
    wanted = make_snapshot(value, version=3)
    found = lay_out_snapshot(wanted)
    for each in (
        found,
        found.copy_into(CopyMemory(), 0),
        unpack_layout(found.pack_bytes()),
        unpack_layout(found.copy_into(CopyMemory(), 0).pack_bytes()),
    ):
        assert back(each).compute_sha256() == wanted.compute_sha256() and back(each).version == 3


def test_what_is_held_stays_as_it_was() -> None:
    live = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": torch.ones(5, dtype=torch.complex64),
        "list": [1, 2],
    }
    wanted = make_snapshot(live).compute_sha256()
    held = lay_out_snapshot(make_snapshot(live, copy=False)).copy_into(CopyMemory(), 0)
    live["a"].zero_()  # type: ignore[attr-defined]
    live["b"].zero_()  # type: ignore[attr-defined]
    live["list"].append(3)  # type: ignore[attr-defined]
    assert back(held).compute_sha256() == wanted


def test_memory_is_used_again_while_it_is_enough() -> None:
    room = CopyMemory()
    first, other = room.get_block(0, 3 * PAGE_SIZE), room.get_block(1, PAGE_SIZE)
    assert first.data_ptr() % PAGE_SIZE == 0 and other.data_ptr() % PAGE_SIZE == 0
    assert (
        room.get_block(0, PAGE_SIZE).data_ptr() == first.data_ptr()
        and room.get_block(0, PAGE_SIZE).nbytes == PAGE_SIZE
    )
    assert room.get_block(0, 3 * PAGE_SIZE).data_ptr() == first.data_ptr()
    assert room.get_block(0, 3 * PAGE_SIZE + 1).nbytes == 3 * PAGE_SIZE + 1
    assert room.get_block(1, PAGE_SIZE).data_ptr() == other.data_ptr()


def test_children_do_not_have_the_memory() -> None:
    """Else each page would be copied once more after a fork."""
    held = CopyMemory().get_block(0, 1 << 20)
    flags, inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            low, high = words[0].split("-")
            inside = int(low, 16) <= held.data_ptr() < int(high, 16)
        elif words[0] == "VmFlags:" and inside:
            flags = line
    assert "dc" in flags.split()


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(images.mmap, "mmap", refuse)
    with pytest.raises(
        CheckpointError,
        match=r"5\.0 MB for a copy of the state .*Cannot allocate memory.* without background=True",
    ):
        CopyMemory().get_block(0, 5_000_000)
