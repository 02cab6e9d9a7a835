"""Several workers write one checkpoint: it is there when all have, and who couldn't is named."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.files import catalogue, checkpoint, disk, pending
from paceline.checkpoint.files.block_files import BlocksLayout, LocalBlocks, lay_out_blocks
from paceline.checkpoint.files.file_layout import lay_out_snapshot
from paceline.errors import CheckpointError
from paceline.state.snapshot import Snapshot, make_snapshot

FULL = torch.arange(12.0).view(4, 3)


def part(number: int) -> BlocksLayout:
    """Two rows of four."""
    box = ((2 * number, 2 * number + 2), (0, 3))
    return lay_out_blocks(
        number,
        {"model/w": LocalBlocks(FULL.dtype, (4, 3), ((box, FULL[2 * number : 2 * number + 2]),))},
    )


def state() -> Snapshot:
    tree = make_snapshot({"model": {"w": FULL}}).tree
    return Snapshot(1, tree, {})


def test_a_checkpoint_is_there_when_all_parts_are(tmp_path: Path) -> None:
    place = pending.reserve_folder(tmp_path)
    assert place.is_dir() and catalogue.list_newest(tmp_path) == []

    def first() -> None:
        pending.write_part(place, 0, part(0))
        checkpoint.write_checkpoint(
            tmp_path,
            lay_out_snapshot(state()),
            1,
            own={},
            keep=3,
            at=place,
            blocks=lambda there: pending.collect_parts(there, [0, 1], 60),
        )

    thread = threading.Thread(target=first)
    thread.start()
    assert catalogue.list_newest(tmp_path) == [], "one part is missing"
    pending.write_part(place, 1, part(1))
    thread.join(60)
    found = checkpoint.load_checkpoint(tmp_path, say=print)
    assert torch.equal(found.snapshot.unpack_state()["model"]["w"], FULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert not list(found.path.glob("*.done"))


def test_a_worker_that_cannot_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = pending.reserve_folder(tmp_path), disk.write_file

    def full(path: Path, *args: object, **options: object) -> object:
        if path.suffix == ".safetensors" and path.name.startswith("blocks-"):
            raise OSError(28, "No space left on device")
        return write(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(disk, "write_file", full)
    with pytest.raises(CheckpointError, match=r"worker 1 can't write its part: .*No space left"):
        pending.write_part(place, 1, part(1))
    with pytest.raises(CheckpointError, match=r"worker 1 can't write its part: .*No space left"):
        checkpoint.write_checkpoint(
            tmp_path,
            lay_out_snapshot(state()),
            1,
            own={},
            keep=3,
            at=place,
            blocks=lambda there: pending.collect_parts(there, [1], 60),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    place = pending.reserve_folder(tmp_path)
    pending.write_part(place, 0, part(0))
    with pytest.raises(
        CheckpointError, match=r"worker 1 has not written its part of the checkpoint within 0.05 s"
    ):
        pending.collect_parts(place, [0, 1], 0.05)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    place = pending.reserve_folder(tmp_path)
    with pending.remove_afterwards(place):
        pass
    with pytest.raises(CheckpointError, match=r"worker 3 can't write its part"):
        pending.write_part(place, 3, part(0))


def test_a_worker_that_writes_on_while_the_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, unlink, late = pending.reserve_folder(tmp_path), os.unlink, list[CheckpointError]()

    def removed(*args: Any, **options: Any) -> None:
        if not late:  # the folder has been listed
            with pytest.raises(CheckpointError, match=r"worker 1 can't write its part") as raised:
                pending.write_part(place, 1, part(1))
            late.append(raised.value)
        unlink(*args, **options)

    with pytest.raises(CheckpointError, match="it failed"), pending.remove_afterwards(place):
        pending.write_part(place, 0, part(0))
        monkeypatch.setattr(os, "unlink", removed)
        raise CheckpointError("it failed")
    assert late and list(tmp_path.iterdir()) == []


def test_what_a_worker_says_is_not_believed(tmp_path: Path) -> None:
    place = pending.reserve_folder(tmp_path)
    for text in (
        "{",
        "[]",
        '{"file": "x"}',
        '{"file": "x", "written": {"nbytes": 1, "sha256": ""}, "index": {"w": 3}}',
    ):
        (place / "blocks-00000.done").write_text(text)
        with pytest.raises(CheckpointError):
            pending.collect_parts(place, [0], 1)


def test_leftovers_are_swept(tmp_path: Path) -> None:
    left = pending.reserve_folder(tmp_path)
    (left / "x").write_text("half")
    place = pending.reserve_folder(tmp_path)
    assert [path.resolve() for path in tmp_path.iterdir()] == [place.parent.resolve()]
