"""Checkpoints that somebody has made up: whatever stands in them, they are used rightly, or
named and passed over.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.checkpoint.files import disk
from paceline.checkpoint.files.block_files import BlockReader, LocalBlocks, lay_out_blocks
from paceline.checkpoint.files.catalogue import list_newest
from paceline.checkpoint.files.checkpoint import (
    WrittenBlocks,
    load_checkpoint,
    save_checkpoint,
    write_checkpoint,
)
from paceline.checkpoint.files.export import state_dict
from paceline.checkpoint.files.file_layout import lay_out_snapshot
from paceline.checkpoint.files.manifest import seal_manifest
from paceline.errors import CheckpointError, UsageError
from paceline.state.snapshot import Snapshot, make_snapshot, snapshot_from_bytes
from paceline.state.versioned import VersionedState

Damage = Callable[[Path], object]


def whole(mark: float = 1.0) -> Snapshot:
    """A state with everything in it that a state may have."""
    values: dict[str, Any] = {
        "rows": torch.full((4, 3), mark).t(),
        "turned": torch.full((3,), 1j, dtype=torch.complex128),
        "brain": torch.ones(3, dtype=torch.bfloat16),
        "small": torch.ones(2, dtype=torch.uint16),
        "array": np.arange(3.0),
        "scalar": np.float32(2),
        "numbers": [1, -2.5, float("inf"), 1j, b"bytes", None, True],
        "kinds": (torch.float32, torch.device("cpu"), torch.Size((1, 2)), {1, 2}, frozenset({"a"})),
        "maps": [OrderedDict(a=1), Counter("aab"), {0: "zero", "0": "text"}],
        "model": nn.Linear(3, 2).state_dict(),
    }
    return make_snapshot(values, version=3)


def two(folder: Path) -> Path:
    """Checkpoints of the steps 1 and 2; gives the second one."""
    own = {
        0: make_snapshot({"mine": torch.ones(2), "step": 1}),
        1: make_snapshot({"mine": torch.zeros(1)}),
    }
    save_checkpoint(folder, whole(1.0), 1, own=own)
    return save_checkpoint(folder, whole(2.0), 2, own=own)


def seal(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest as paceline does."""
    manifest.pop("seal", None)
    (path / "manifest.json").write_bytes(seal_manifest(manifest))


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    return found


def note(path: Path, file: str) -> None:
    """Let the manifest have the right hash of a file."""
    data, head = (path / file).read_bytes(), manifest(path)
    head["files"][file] = {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(path, head)


def passed_over(folder: Path, *words: str) -> None:
    """The second one is named in one line, with these words; the first one is used, and a save
    goes on.
    """
    said: list[str] = []
    found = load_checkpoint(folder, say=said.append)
    assert found.step == 1 and float(found.snapshot.unpack_state()["rows"][0, 0]) == 1
    assert len(said) == 1 and "\n" not in said[0] and len(said[0]) < 600
    assert said[0].startswith("step-00000002: ") and said[0].endswith(
        "Using step-00000001, which is complete"
    )
    assert all(word in said[0] for word in words), said[0]
    with pytest.raises(CheckpointError, match="can be used: step-00000002"):
        load_checkpoint(folder, say=said.append, step=2)


# What lies in the folder
# --------------------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    """The same bytes, but outside."""
    outside = path.parent.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def listening(path: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # addresses are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(before)


def zeros(path: Path) -> None:
    """A link to a device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", [pipe, link, loop, folder, listening, zeros])
@pytest.mark.parametrize(
    "file", ["manifest.json", "state.json", "tensors.safetensors", "own-00001.json"]
)
def test_what_is_no_file_is_passed_over(tmp_path: Path, file: str, kind: Damage) -> None:
    kind(two(tmp_path / "c") / file)
    passed_over(tmp_path / "c", f"{file} ")
    save_checkpoint(tmp_path / "c", whole(3.0), 3, keep=1)
    assert [path.name for path in list_newest(tmp_path / "c")] == ["step-00000003"]


def test_a_file_of_no_bytes_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = two(tmp_path)
    (path / "state.json").write_bytes(b"")
    note(path, "state.json")
    pipe(path / "state.json")
    passed_over(tmp_path, "state.json")


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/hostname",
        "..",
        "",
        "a/b",
        ".hidden",
        "a\0b",
        "x\ny",
        "\ud800",
        "a" * 300,
        "nul\\x",
    ],
)
def test_a_name_leads_nowhere_else(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing outside of the folder is opened, whatever the manifest names, with the right hash."""
    path = two(tmp_path / "c")
    (tmp_path / "c" / "outside").write_bytes(b"")
    head = manifest(path)
    head["files"][name] = {"nbytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    seal(path, head)
    opened, how = [], disk.open_plain_file
    monkeypatch.setattr(disk, "open_plain_file", lambda path: opened.append(path) or how(path))
    passed_over(tmp_path / "c")
    assert {found.parent.parent for found in opened} == {tmp_path / "c"}
    assert {found.name for found in opened} <= {*manifest(path)["files"], "manifest.json"} - (
        {name} if len(name) < 300 else set()
    )


def test_what_is_left_of_a_save_may_be_anything(tmp_path: Path) -> None:
    two(tmp_path / "c")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "c" / ".saving-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "c" / ".saving-file").touch()
    os.mkfifo(tmp_path / "c" / ".saving-pipe")
    save_checkpoint(tmp_path / "c", whole(3.0), 3)
    assert (
        not list((tmp_path / "c").glob(".saving*")) and (tmp_path / "elsewhere" / "kept").exists()
    )


def test_a_link_to_nowhere_in_the_place_of_the_next_one(tmp_path: Path) -> None:
    two(tmp_path)
    (tmp_path / "step-00000003").symlink_to("nowhere")
    assert save_checkpoint(tmp_path, whole(3.0), 3).name == "step-00000003.2"
    assert load_checkpoint(tmp_path, say=print).step == 3


def test_checkpoints_that_are_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "c").symlink_to("nowhere")
    with pytest.raises(
        CheckpointError,
        match=r"step 1 was not saved: .*File exists.*Check that .*c can be written; there is none in",  # noqa: E501
    ):
        save_checkpoint(tmp_path / "c", whole(), 1)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_checkpoint(tmp_path / "c", say=print)


# What stands in the files
# --------------------------------------------------------------------------------------------------


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def tree(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another `state.json`, with the right hash."""

    def damage(path: Path) -> None:
        head = json.loads((path / "state.json").read_bytes())
        change(head)
        (path / "state.json").write_text(json.dumps(head))
        note(path, "state.json")

    return damage


def state(text: str) -> Damage:
    def damage(path: Path) -> None:
        (path / "state.json").write_text(text)
        note(path, "state.json")

    return damage


def put(value: Any) -> Damage:
    return tree(lambda head: head["tree"].update(rows=value))


TENSOR = {"$": "tensor", "path": "rows"}
MADE_UP: dict[str, Damage] = {
    "strides that overlap": put(TENSOR | {"stride": [0, 0]}),
    "strides below zero": put(TENSOR | {"stride": [-1, 4]}),
    "strides for terabytes": put(TENSOR | {"stride": [1 << 40, 1]}),
    "strides beyond all numbers": put(TENSOR | {"stride": [1 << 70, 1]}),
    "strides of another dim": put(TENSOR | {"stride": [1]}),
    "strides in words": put(TENSOR | {"stride": "wide"}),
    "a path that is a list": put({"$": "tensor", "path": []}),
    "no path": put({"$": "tensor"}),
    "bytes that are none": put({"$": "bytes", "value": "xyz"}),
    "bytes in a number": put({"$": "bytes", "value": 5}),
    "a set of lists": put({"$": "set", "items": [[]]}),
    "a key that is a list": put({"$": "dict", "items": [[[], 1]]}),
    "a map of single items": put({"$": "dict", "items": [[1]]}),
    "no items": put({"$": "tuple"}),
    "a size of words": put({"$": "size", "items": ["a"]}),
    "metadata of a tuple": put({"$": "tuple", "items": [], "metadata": 1}),
    "a float in words": put({"$": "float", "value": "moon"}),
    "a complex number of three": put({"$": "complex", "value": ["0x1p0"] * 3}),
    "a dtype that is a function": put({"$": "dtype", "value": "load"}),
    "a dtype that is a module": put({"$": "dtype", "value": "os"}),
    "a dtype in a list": put({"$": "dtype", "value": []}),
    "a device that is none": put({"$": "device", "value": "moon"}),
    "an array of bfloat16": put({"$": "array", "of": TENSOR | {"path": "brain"}}),
    "an array of nothing": put({"$": "array", "of": {}}),
    "a kind that is a list": put({"$": []}),
    "a tensor of a function": tree(lambda head: head["tensors"].update(rows=["load", [12]])),
    "a tensor of quarters of bytes": tree(
        lambda head: head["tensors"].update(rows=["quint4x2", [12]])
    ),
    "a tensor of bits": tree(lambda head: head["tensors"].update(rows=["uint1", [48]])),
    "a shape of terabytes": tree(lambda head: head["tensors"].update(small=["uint16", [1 << 40]])),
    "a shape beyond all numbers": tree(
        lambda head: head["tensors"].update(small=["uint16", [1 << 70]])
    ),
    "a note on nothing": tree(lambda head: head["tensors"].update(nowhere=["uint16", [2]])),
    "notes that are a list": tree(lambda head: head.update(tensors=[1])),
    "a thousand levels": state('{"version": 1, "tensors": {}, "tree": ' + deep(990) + "}"),
    "a hundred thousand levels": state(
        '{"version": 1, "tensors": {}, "tree": ' + deep(100_000) + "}"
    ),
    "a version in words": tree(lambda head: head.update(version="old")),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_what_is_made_up_is_passed_over(tmp_path: Path, kind: str) -> None:
    """With all hashes right."""
    MADE_UP[kind](two(tmp_path))
    passed_over(
        tmp_path,
        "state.json can't be used: another version of paceline, or of torch, has written it",
    )


@pytest.mark.parametrize(
    "text",
    [
        deep(990),
        deep(100_000),
        '{"format": 1, "own": ' + deep(950) + "}",
        "NaN",
        '{"format": 1, "seal": "\\ud800"}',
        "[]",
    ],
)
def test_a_manifest_that_is_made_up_is_passed_over(tmp_path: Path, text: str) -> None:
    (two(tmp_path) / "manifest.json").write_text(text)
    passed_over(tmp_path, "manifest.json is damaged")
    save_checkpoint(tmp_path, whole(3.0), 3)


def test_a_manifest_without_end_is_not_read(tmp_path: Path) -> None:
    """A file with holes takes no room on the disk, and would take all memory."""
    with (two(tmp_path) / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    passed_over(tmp_path, "manifest.json can't be read (it has more than")


def test_a_part_of_a_table_that_is_made_up_is_named(tmp_path: Path) -> None:
    path = two(tmp_path)
    shutil.copy(path / "tensors.safetensors", path / "table-000-00000.safetensors")
    (path / "table-000-00000.json").write_text(
        '{"version": 1, "tree": {"$": "dtype", "value": "load"}, "tensors": {}}'
    )
    note(path, "table-000-00000.safetensors")
    note(path, "table-000-00000.json")
    found = load_checkpoint(tmp_path, say=print)
    assert found.step == 2 and found.extra_states == ("table-000-00000",)
    with pytest.raises(
        CheckpointError,
        match=r"step-00000002: table-000-00000\.json can't be used: another version of paceline",
    ):
        found.read_state("table-000-00000")


@pytest.mark.parametrize(
    "found", [5, [], None, {"model": 5}, {"model": {}}, {"model": [1, 2]}], ids=repr
)
def test_a_state_of_nothing_that_is_here(found: Any) -> None:
    with pytest.raises(CheckpointError):
        VersionedState(model=nn.Linear(3, 2)).restore_snapshot(make_snapshot(found))


# At random
# --------------------------------------------------------------------------------------------------


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a tree, with what it lies in."""
    for key in (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        yield node, key
        yield from places(node[key])


ODD: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        3,
        1 << 31,
        1 << 63,
        1 << 70,
        0.5,
        -1e308,
        "",
        "load",
        "..",
        "../step-00000001/state.json",
        "/etc/passwd",
    ),
    *(
        [],
        {},
        [0],
        [-1],
        [1 << 40],
        {"$": "tensor"},
        {"$": "tensor", "path": "rows", "stride": [4, 1]},
        {"$": "set", "items": [[]]},
    ),
    *(
        {"$": "dtype", "value": "os"},
        {"$": 1},
        "float64",
        "uint8",
        "quint8",
        "complex128",
        [[[[[]]]]],
        "\ud800",
        "x" * 3000,
    ),
    *(
        "state.json",
        "tensor",
        "array",
        "scalar",
        "dict",
        "counter",
        "size",
        "bytes",
        "ordered",
        "nan",
        "1e999",
    ),
]


def mutate(node: dict[str, Any], draw: random.Random) -> None:
    """Change something somewhere, once or a few times."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        within, key = draw.choice(list(places(node)))
        other, there = draw.choice(list(places(node)))
        kind = draw.randrange(4)
        if kind == 0:
            del within[key]
        elif kind == 1:
            within[key] = copy.deepcopy(other[there])
        else:
            within[key] = copy.deepcopy(draw.choice(ODD))
        if not list(places(node)):
            return


def hurt(path: Path, draw: random.Random) -> str:
    """Change the manifest, a tree, or the head of a file of tensors; all hashes are right.

    Gives the file.
    """
    file = draw.choice(
        ("manifest.json", "state.json", "state.json", "own-00000.json", "tensors.safetensors")
    )
    if file == "tensors.safetensors":
        data = bytearray((path / file).read_bytes())
        length = int.from_bytes(data[:8], "little")
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(8 + length)] = draw.choice(
                (draw.randrange(256), ord("9"), ord("0"), ord('"'))
            )
        (path / file).write_bytes(data)
    else:
        head = json.loads((path / file).read_bytes())
        mutate(head, draw)
        if file == "manifest.json":
            seal(path, head)
            return file
        (path / file).write_text(json.dumps(head))
    note(path, file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_any_change_is_used_rightly_or_passed_over(tmp_path: Path, count: int) -> None:
    path, draw, used = two(tmp_path), random.Random(20), 0
    clean = {file.name: file.read_bytes() for file in path.iterdir()}
    for number in range(count):
        file = hurt(path, draw)
        said: list[str] = []
        found = load_checkpoint(tmp_path, say=said.append)
        found.snapshot.unpack_state()
        for snapshot in found.worker_snapshots.values():
            snapshot.unpack_state()
        used += found.step == 2
        if (
            found.step == 1 and list_newest(tmp_path)[0] == path
        ):  # or it is said to be the older one
            known = (*clean, "its folder has been renamed", "of a newer paceline")
            assert (
                len(said) == 1
                and said[0].startswith("step-00000002: ")
                and any(word in said[0] for word in known)
            ), (number, said)
        for name in {file, "manifest.json"}:
            (path / name).write_bytes(clean[name])
    assert count / 20 < used < count * 19 / 20, "some changes mean something else that can be read"


def test_any_bytes_that_come_are_a_snapshot_or_refused() -> None:
    """As servers and newcomers are sent them."""
    data, draw, read = whole().to_bytes(), random.Random(5), 0
    length = int.from_bytes(data[:8], "little")
    for _ in range(1500):
        hurt_ones = bytearray(data)
        if draw.random() < 0.5:
            head = json.loads(data[8 : 8 + length])
            mutate(head, draw)
            text = json.dumps(head).encode()
            hurt_ones = bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :])
        else:
            for _ in range(draw.randint(1, 3)):
                hurt_ones[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(CheckpointError):
            snapshot_from_bytes(bytes(hurt_ones)).unpack_state()
            read += 1
    assert 50 < read < 1450


# Files of blocks
# --------------------------------------------------------------------------------------------------

FULL = torch.arange(24.0).view(4, 6)


def cut(folder: Path, step: int) -> Path:
    """A checkpoint of two workers that have the left and the right of a weight."""
    state = make_snapshot(
        {
            "model": {
                "weight": FULL,
                "bias": torch.ones(4),
                "mark": torch.ones(2, dtype=torch.uint16),
            }
        },
        version=step,
    )
    rest = {name: tensor for name, tensor in state.tensors.items() if name != "model/weight"}

    def blocks(place: Path) -> list[WrittenBlocks]:
        layouts = []
        for number, columns in enumerate(((0, 2), (2, 6))):
            piece = (((0, 4), columns), FULL[:, slice(*columns)])
            layouts.append(
                lay_out_blocks(number, {"model/weight": LocalBlocks(FULL.dtype, (4, 6), (piece,))})
            )
        return [
            WrittenBlocks(
                {each.file: disk.write_file(place / each.file, each.layout.iterate_bytes())},
                each.index,
            )
            for each in layouts
        ]

    return write_checkpoint(
        folder,
        lay_out_snapshot(Snapshot(step, state.tree, rest)),
        step,
        own={},
        keep=3,
        blocks=blocks,
    )


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Another `blocks.json`, with the right hash."""

    def damage(path: Path) -> None:
        found = json.loads((path / "blocks.json").read_bytes())
        change(found)
        (path / "blocks.json").write_text(json.dumps(found))
        note(path, "blocks.json")

    return damage


def text(written: str) -> Damage:
    def damage(path: Path) -> None:
        (path / "blocks.json").write_text(written)
        note(path, "blocks.json")

    return damage


def form(**fields: Any) -> Damage:
    return index(lambda found: found["model/weight"].update(fields))


def more(dtype: Any, shape: Any) -> Damage:
    """Another tensor, of which no block is there."""
    return index(lambda found: found.update(more={"dtype": dtype, "shape": shape, "blocks": []}))


def many(rows: int, columns: int) -> Damage:
    """A tensor in a grid of blocks, all of the same bytes."""
    grid = [
        [[row, row + 1], [column, column + 1]] for row in range(rows) for column in range(columns)
    ]
    blocks = [
        {"file": "blocks-00000.safetensors", "key": "model/weight@0", "box": box} for box in grid
    ]

    def damage(path: Path) -> None:
        index(
            lambda found: found.update(
                more={"dtype": "uint8", "shape": [rows, columns], "blocks": blocks}
            )
        )(path)
        (path / "blocks-00000.safetensors").write_bytes(
            (path / "blocks-00000.safetensors").read_bytes() + bytes(rows * columns)
        )
        note(path, "blocks-00000.safetensors")

    return damage


WRONG_BLOCKS: dict[str, Damage] = {
    "a thousand levels": text(deep(990)),
    "a hundred thousand levels": text(deep(100_000)),
    "a hundred thousand objects": text('{"a":' * 100_000 + "}" * 100_000),
    "a number of many digits": text('{"a": ' + "9" * 9000 + "}"),
    "a list": text("[1]"),
    "a tensor that is a list": index(lambda found: found.update(more=[])),
    "a shape below zero": form(shape=[-4, -6]),
    "a shape beyond all numbers": form(shape=[4, 1 << 70]),
    "an empty shape beyond all numbers": more("float32", [0, 1 << 70]),
    "an empty shape of too many": more("float32", [0, 1 << 40, 1 << 40]),
    "a shape of a thousand dims": more("float32", [0] * 1000),
    "a shape in a text": form(shape="46"),
    "a dtype of quarters of bytes": more("quint4x2", [0]),
    "a dtype of bits": more("bits8", [0]),
    "a dtype in a list": form(dtype=[]),
    "a dtype that is a function": form(dtype="load"),
    "boxes that are numbers": form(
        blocks=[{"file": "blocks-00000.safetensors", "key": "model/weight@0", "box": 5}]
    ),
    "boxes of three": form(
        blocks=[{"file": "blocks-00000.safetensors", "key": "model/weight@0", "box": [[0, 4, 6]]}]
    ),
    "a thousand blocks that say the same": form(
        blocks=[{"file": "x", "key": "k", "box": [[0, 1], [0, 1]]}] * 1000
    ),
    "sixty thousand columns": many(1, 60_000),
    "sixty thousand in a grid": many(240, 250),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", WRONG_BLOCKS)
def test_blocks_that_are_made_up_are_passed_over(tmp_path: Path, kind: str, *, lazy: bool) -> None:
    cut(tmp_path, 1)
    WRONG_BLOCKS[kind](cut(tmp_path, 2))
    said: list[str] = []
    assert load_checkpoint(tmp_path, say=said.append, lazy=lazy).step == 1
    assert (
        len(said) == 1
        and "\n" not in said[0]
        and said[0].startswith("step-00000002: blocks.json can't be used")
    ), said


@pytest.mark.parametrize(
    "shape", [[1 << 70], [-1], [0, 1 << 70], [0] * 1000, "ab", None, [1.5], [True]], ids=str
)
def test_a_shape_of_what_is_not_cut_is_refused(tmp_path: Path, shape: Any) -> None:
    """That of the file, and that of a note on a dtype which safetensors doesn't know."""
    cut(tmp_path, 1)
    path = cut(tmp_path, 2)
    head = json.loads((path / "state.json").read_bytes())
    head["tensors"]["model/mark"][1] = shape
    (path / "state.json").write_text(json.dumps(head))
    note(path, "state.json")
    for lazy in (False, True):
        found = load_checkpoint(tmp_path, say=lambda _: None, lazy=lazy)
        assert found.step == 1 or (
            shape == [-1] and found.snapshot.unpack_state()["model"]["mark"].tolist() == [1, 1]
        )
    data = (path / "tensors.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + length])
    found["model/bias"]["shape"] = shape
    header = json.dumps(found).encode()
    (path / "tensors.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data[8 + length :]
    )
    note(path, "tensors.safetensors")
    for lazy in (False, True):
        assert load_checkpoint(tmp_path, say=lambda _: None, lazy=lazy).step == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_any_change_of_blocks_is_used_rightly_or_passed_over(tmp_path: Path, *, lazy: bool) -> None:
    cut(tmp_path, 1)
    path, draw, used = cut(tmp_path, 2), random.Random(3), 0
    clean = {file.name: file.read_bytes() for file in path.iterdir()}
    for _ in range(400):
        file = draw.choice(("blocks.json", "blocks.json", "state.json"))
        head = json.loads(clean[file])
        mutate(head, draw)
        (path / file).write_text(json.dumps(head))
        note(path, file)
        found = load_checkpoint(tmp_path, say=lambda _: None, lazy=lazy)
        with contextlib.suppress(CheckpointError), BlockReader(found.path, found.index) as reader:
            for name in reader.index:
                reader.read_rectangle(name)
        with contextlib.suppress(CheckpointError, UsageError):
            state_dict(found.path)
        used += found.step == 2
        for name, data in clean.items():
            (path / name).write_bytes(data)
    assert 20 < used < 380
