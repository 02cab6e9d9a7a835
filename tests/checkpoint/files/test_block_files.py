"""Files of blocks: any rectangle comes back from any other cut, and what is damaged or missing
is named.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.files import checkpoint, disk
from paceline.checkpoint.files.block_files import (
    INDEX_FILE,
    BlockReader,
    LocalBlocks,
    lay_out_blocks,
    read_uncut_index,
)
from paceline.checkpoint.files.checkpoint import WrittenBlocks
from paceline.checkpoint.files.file_layout import lay_out_snapshot
from paceline.errors import CheckpointError
from paceline.state.blocks import Box, StoredBlock, StoredTensor, merge_indexes, slice_within
from paceline.state.blocks import whole_box as everything
from paceline.state.snapshot import make_snapshot

edges = st.lists(st.integers(0, 9), max_size=3)


def cut(logical: Tensor, boxes: list[Box]) -> LocalBlocks:
    """What a worker has that holds these rectangles."""
    return LocalBlocks(
        logical.dtype,
        tuple(logical.shape),
        tuple((box, logical[slice_within(box, everything(logical.shape))]) for box in boxes),
    )


def boxes(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    lines = [
        sorted({0, size, *(place for place in cut if place < size)})
        for size, cut in zip(shape, cuts, strict=True)
    ]
    return list(itertools.product(*(list(itertools.pairwise(line)) for line in lines)))


def put(folder: Path, workers: list[dict[str, LocalBlocks]]) -> BlockReader:
    layouts = [lay_out_blocks(number, tensors) for number, tensors in enumerate(workers)]
    for layout in layouts:
        disk.write_file(folder / layout.file, layout.layout.iterate_bytes())
    return BlockReader(folder, merge_indexes(layout.index for layout in layouts))


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(edges, edges),
    st.tuples(edges, edges),
)
def test_written_in_one_cut_and_read_in_another(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int],
    one: tuple[list[int], list[int]],
    other: tuple[list[int], list[int]],
) -> None:
    logical = torch.arange(shape[0] * shape[1]).view(shape)
    mine = boxes(shape, list(one))
    with put(
        tmp_path_factory.mktemp("blocks"),
        [{"w": cut(logical, mine[0::2])}, {"w": cut(logical, mine[1::2])}],
    ) as reader:
        for box in boxes(shape, list(other)):
            assert torch.equal(
                reader.read_rectangle("w", box), logical[slice_within(box, everything(shape))]
            )
        assert torch.equal(reader.read_rectangle("w"), logical)


def test_only_the_files_that_are_needed_are_opened(tmp_path: Path) -> None:
    logical = torch.randn(4, 4)
    top, bottom = boxes((4, 4), [[2], []])
    with put(tmp_path, [{"w": cut(logical, [top])}, {"w": cut(logical, [bottom])}]) as reader:
        (tmp_path / "blocks-00001.safetensors").unlink()
        assert torch.equal(reader.read_rectangle("w", ((0, 2), (1, 3))), logical[0:2, 1:3])
        with pytest.raises(
            CheckpointError, match=r"w can't be read from blocks-00001.safetensors in test_only"
        ):
            reader.read_rectangle("w", ((1, 3), (1, 3)))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.bool,
        torch.int64,
        torch.uint16,
    ],
)
def test_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    logical = torch.arange(12).view(3, 4).to(dtype)
    left, right = boxes((3, 4), [[], [1]])
    with put(tmp_path, [{"w": cut(logical, [left])}, {"w": cut(logical, [right])}]) as reader:
        part = reader.read_rectangle("w", ((1, 3), (0, 3)))
        assert part.dtype == dtype and part.tolist() == logical[1:3, 0:3].tolist()


def test_scalars_and_nothing(tmp_path: Path) -> None:
    scalar, empty = torch.tensor(3.0), torch.empty(0, 3)
    with put(
        tmp_path,
        [{"s": cut(scalar, [()]), "e": cut(empty, [((0, 0), (0, 3))])}, {"e": cut(empty, [])}],
    ) as reader:
        assert reader.read_rectangle("s") == 3 and reader.read_rectangle("e").shape == (0, 3)


def test_wrong_questions(tmp_path: Path) -> None:
    with put(tmp_path, [{"model/weight": cut(torch.ones(2), [((0, 2),)])}]) as reader:
        with pytest.raises(
            CheckpointError,
            match=r"no tensor 'model/wieght'; possible: model/weight; did you mean model/weight\?",
        ):
            reader.read_rectangle("model/wieght")
        for box in (((0, 3),), ((0, 1), (0, 1)), ()):
            with pytest.raises(CheckpointError, match=r"model/weight has the shape \[2\] in"):
                reader.read_rectangle("model/weight", box)


def test_the_nearest_of_many_names(tmp_path: Path) -> None:
    with (
        put(
            tmp_path, [{f"layers.{i}.weight": cut(torch.ones(1), [((0, 1),)]) for i in range(20)}]
        ) as reader,
        pytest.raises(CheckpointError, match=r"it has 20 others; did you mean layers.7.weight\?"),
    ):
        reader.read_rectangle("layers.7.wight")


def test_files_of_whole_tensors_are_read_in_parts(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(4, 6),
        "z": torch.randn(3, 3, dtype=torch.complex128),
        "s": torch.tensor(2),
    }
    layout = lay_out_snapshot(make_snapshot(tensors))
    disk.write_file(tmp_path / "tensors.safetensors", layout.iterate_bytes())
    with BlockReader(
        tmp_path, read_uncut_index(tmp_path / "tensors.safetensors", layout.tree["tensors"])
    ) as reader:
        assert torch.equal(reader.read_rectangle("a", ((1, 3), (2, 4))), tensors["a"][1:3, 2:4])
        assert torch.equal(reader.read_rectangle("z", ((1, 3), (2, 3))), tensors["z"][1:3, 2:3])
        assert reader.read_rectangle("s") == 2


# In a checkpoint
# --------------------------------------------------------------------------------------------------


WEIGHT = torch.arange(24.0).view(4, 6)


def save(folder: Path, step: int = 3) -> Path:
    """A checkpoint of two workers that have half of a weight each."""
    tree = make_snapshot(
        {"model": {"weight": WEIGHT, "bias": torch.ones(4)}, "lr": 0.5}, version=step
    )
    shared = make_snapshot({"bias": torch.ones(4)})
    state = lay_out_snapshot(type(tree)(step, tree.tree, {"model/bias": shared.tensors["bias"]}))
    halves = boxes((4, 6), [[], [2]])

    def others(place: Path) -> list[WrittenBlocks]:
        layouts = [
            lay_out_blocks(number, {"model/weight": cut(WEIGHT, [box])})
            for number, box in enumerate(halves)
        ]
        return [
            WrittenBlocks(
                {layout.file: disk.write_file(place / layout.file, layout.layout.iterate_bytes())},
                layout.index,
            )
            for layout in layouts
        ]

    return checkpoint.write_checkpoint(folder, state, step, own={}, keep=3, blocks=others)


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_checkpoint_of_blocks_is_put_together(tmp_path: Path) -> None:
    path = save(tmp_path)
    assert {entry.name for entry in path.iterdir()} >= {
        INDEX_FILE,
        "blocks-00000.safetensors",
        "blocks-00001.safetensors",
    }
    state = checkpoint.load_checkpoint(tmp_path, say=silent).snapshot.unpack_state()
    assert torch.equal(state["model"]["weight"], WEIGHT) and state["lr"] == 0.5
    found = checkpoint.load_checkpoint(tmp_path, say=silent, lazy=True)
    assert all(tensor.is_meta for tensor in found.snapshot.tensors.values())
    with BlockReader(found.path, found.index) as reader:
        assert torch.equal(
            reader.read_rectangle("model/weight", ((1, 2), (1, 4))), WEIGHT[1:2, 1:4]
        )
        assert torch.equal(reader.read_rectangle("model/bias"), torch.ones(4))
    assert (
        checkpoint.read_checkpoint(path).snapshot.compute_sha256()
        == checkpoint.load_checkpoint(tmp_path, say=silent).snapshot.compute_sha256()
    )


def test_older_versions_refuse_blocks_and_read_all_else(tmp_path: Path) -> None:
    def version(path: Path) -> int:
        return int(json.loads((path / "manifest.json").read_text())["format"])

    assert version(save(tmp_path)) == 2
    assert version(checkpoint.save_checkpoint(tmp_path, make_snapshot({}), 4)) == 1


def test_a_damaged_block_is_never_used(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    file = path / "blocks-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    assert checkpoint.load_checkpoint(tmp_path, say=said.append).step == 1
    assert (
        "step-00000002: blocks-00001.safetensors is damaged" in said[0]
        and "Using step-00000001" in said[0]
    )
    with pytest.raises(CheckpointError, match=r"step-00000002 can't be used: blocks-00001"):
        checkpoint.read_checkpoint(path)


def missing(place: Path) -> list[WrittenBlocks]:
    layout = lay_out_blocks(0, {"model/weight": cut(WEIGHT, boxes((4, 6), [[], [2]])[:1])})
    return [
        WrittenBlocks(
            {layout.file: disk.write_file(place / layout.file, layout.layout.iterate_bytes())},
            layout.index,
        )
    ]


def test_a_block_that_nobody_writes_is_noticed_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"model/weight can't be saved in blocks: its blocks have 8 of 24 elements",
    ):
        checkpoint.write_checkpoint(
            tmp_path, lay_out_snapshot(make_snapshot({})), 1, own={}, keep=3, blocks=missing
        )
    assert list(tmp_path.iterdir()) == []


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    def elsewhere(place: Path) -> list[WrittenBlocks]:
        layout = lay_out_blocks(0, {"w": cut(WEIGHT, boxes((4, 6), [[], []]))})
        disk.write_file(place / layout.file, layout.layout.iterate_bytes())
        return [WrittenBlocks({}, layout.index)]  # so it isn't in the manifest

    path = checkpoint.write_checkpoint(
        tmp_path, lay_out_snapshot(make_snapshot({})), 1, own={}, keep=3, blocks=elsewhere
    )
    with pytest.raises(
        CheckpointError,
        match=r"blocks.json names 'blocks-00000.safetensors', which manifest.json doesn't",
    ):
        checkpoint.read_checkpoint(path)


def test_only_checkpoints_are_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint"):
        checkpoint.read_checkpoint(tmp_path)


def test_blocks_of_more_bytes_than_there_are_take_no_memory(tmp_path: Path) -> None:
    def huge(place: Path) -> list[WrittenBlocks]:
        layout = lay_out_blocks(0, {"w": cut(WEIGHT, boxes((4, 6), [[], []]))})
        block = StoredBlock(((0, 1 << 40),), layout.file, "w@0")
        written = disk.write_file(place / layout.file, layout.layout.iterate_bytes())
        return [
            WrittenBlocks(
                {layout.file: written}, {"w": StoredTensor(torch.float32, (1 << 40,), (block,))}
            )
        ]

    path = checkpoint.write_checkpoint(
        tmp_path, lay_out_snapshot(make_snapshot({})), 1, own={}, keep=3, blocks=huge
    )
    with pytest.raises(
        CheckpointError,
        match=r"blocks.json names 4398046511104 bytes of blocks-00000.safetensors, which has \d+$",
    ):
        checkpoint.read_checkpoint(path)
