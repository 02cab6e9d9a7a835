"""A checkpoint is there in full or not at all, and a damaged one is never taken for a good one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.checkpoint.files import checkpoint
from paceline.checkpoint.files.catalogue import list_newest
from paceline.checkpoint.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from paceline.checkpoint.files.manifest import seal_manifest
from paceline.errors import CheckpointError, UsageError
from paceline.state.snapshot import Snapshot, make_snapshot
from paceline.state.versioned import GeneratorStates, VersionedState
from tests.harness import nursery


def state(value: float = 1.0, size: int = 10) -> Snapshot:
    return make_snapshot(
        {"model": {"weight": torch.full((size,), value)}, "lr": 0.1, "rows": {0: (1, None)}},
        version=7,
    )


def value(found: Checkpoint) -> float:
    return float(found.snapshot.unpack_state()["model"]["weight"][0])


def silent(text: str) -> None:
    raise AssertionError(f"nothing to say, but said: {text}")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a" / "checkpoints"
    path = save_checkpoint(folder, state(), 40)
    assert path == folder / "step-00000040"
    assert entries(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    found = load_checkpoint(folder, say=silent)
    assert (found.step, found.path, found.snapshot.version, found.worker_snapshots) == (
        40,
        path,
        7,
        {},
    )
    assert found.snapshot.unpack_state()["rows"] == {0: (1, None)}
    assert found.snapshot.compute_sha256() == state().compute_sha256()
    assert entries(folder) == ["step-00000040"]


def test_each_rank_has_its_own(tmp_path: Path) -> None:
    own = {
        rank: make_snapshot(
            GeneratorStates().state_dict() | {"rank": rank, "x": torch.full((rank,), 1j)}
        )
        for rank in (0, 3)
    }
    torch.randn(1)
    path = save_checkpoint(tmp_path, state(), 1, own=own)
    assert "own-00003.safetensors" in entries(path)
    found = load_checkpoint(tmp_path, say=silent)
    assert {
        rank: snapshot.compute_sha256() for rank, snapshot in found.worker_snapshots.items()
    } == {rank: snapshot.compute_sha256() for rank, snapshot in own.items()}


def test_odd_tensors_and_tied_weights(tmp_path: Path) -> None:
    tied = nn.Parameter(torch.randn(4, 4))
    tensors: dict[str, Tensor] = {
        "a": tied,
        "b": tied,
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "complex": torch.randn(2, 2, dtype=torch.complex128).t(),
        "bool": torch.tensor([True, False]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "left": torch.arange(10.0)[:5],
        "columns": torch.arange(6.0).view(2, 3).t(),
    }
    for copy in (True, False):
        save_checkpoint(tmp_path, make_snapshot(tensors, copy=copy), 1)
        back = load_checkpoint(tmp_path, say=silent).snapshot.unpack_state()
        assert all(
            torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype
            for name, tensor in tensors.items()
        )
        assert back["a"] is back["b"]


def test_complex_numbers_lie_where_the_processor_can_use_them(tmp_path: Path) -> None:
    """In the file they begin at multiples of 8; vector instructions on complex128 want 16."""
    for length in range(1, 40):
        name = "z" * length
        save_checkpoint(
            tmp_path, make_snapshot({name: torch.randn(5, dtype=torch.complex128)}), length
        )
        snapshot = load_checkpoint(tmp_path, say=silent).snapshot
        assert snapshot.tensors[name].data_ptr() % 16 == 0, "whatever the length of the header"


def test_nothing_but_scalars(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_snapshot({"step": 3}), 0)
    assert load_checkpoint(tmp_path, say=silent).snapshot.unpack_state() == {"step": 3}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_checkpoint(tmp_path, state(step), step, keep=2)
    assert entries(tmp_path) == ["step-00000006", "step-00000007"]
    assert value(load_checkpoint(tmp_path, say=silent)) == 7
    assert value(load_checkpoint(tmp_path, say=silent, step=6)) == 6
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .*there are: 6, 7"):
        load_checkpoint(tmp_path, say=silent, step=3)


def test_going_back_makes_the_older_step_the_newest(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        save_checkpoint(tmp_path, state(step), step)
    save_checkpoint(tmp_path, state(41), 40, keep=1)  # resumed from 20, saved 40 again
    assert entries(tmp_path) == ["step-00000040.2"]
    found = load_checkpoint(tmp_path, say=silent)
    assert (found.step, value(found)) == (40, 41)
    assert value(load_checkpoint(tmp_path, say=silent, step=40)) == 41


@pytest.mark.parametrize("folder", ["absent", "."])
def test_none_there(tmp_path: Path, folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*without resuming"):
        load_checkpoint(tmp_path / folder, say=silent)


@pytest.mark.parametrize(("keep", "step"), [(0, 1), (1, -1)])
def test_arguments_are_checked(tmp_path: Path, keep: int, step: int) -> None:
    with pytest.raises(UsageError, match="keep >= 1 and step >= 0"):
        save_checkpoint(tmp_path, state(), step, keep=keep)


# Damage
# --------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = [flip, cut, grow, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(
    "file",
    [
        "manifest.json",
        "state.json",
        "tensors.safetensors",
        "own-00000.json",
        "own-00000.safetensors",
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    tmp_path: Path, file: str, damage: Callable[[Path], object]
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), step, own={0: state()})
    damage(tmp_path / "step-00000002" / file)
    said: list[str] = []
    found = load_checkpoint(tmp_path, say=said.append)
    assert (found.step, value(found)) == (1, 1)
    assert len(said) == 1
    assert said[0].startswith(f"step-00000002: {file} ")
    assert said[0].endswith("Using step-00000001, which is complete")
    with pytest.raises(CheckpointError, match=f"can be used: step-00000002: {file} "):
        load_checkpoint(tmp_path, say=silent, step=2)


def test_every_single_bit_of_every_file_counts(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, state(size=2), 1)
    for file in entries(path):
        whole = (path / file).read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << (position % 8)
            (path / file).write_bytes(damaged)
            with pytest.raises(CheckpointError):
                load_checkpoint(tmp_path, say=silent)
        (path / file).write_bytes(whole)
    load_checkpoint(tmp_path, say=silent)


def test_all_broken(tmp_path: Path) -> None:
    for step in (1, 2):
        flip(save_checkpoint(tmp_path, state(), step) / "state.json")
    with pytest.raises(
        CheckpointError,
        match=r"can be used: step-00000002: state\.json is damaged.*; step-00000001: state\.json is",  # noqa: E501
    ):
        load_checkpoint(tmp_path, say=silent)


def test_saving_after_a_broken_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), 1)
    cut(save_checkpoint(tmp_path, state(2), 2) / "manifest.json")
    save_checkpoint(tmp_path, state(3), 2)  # step 2 once more: the broken folder has its name
    said: list[str] = []
    assert value(load_checkpoint(tmp_path, say=said.append)) == 3
    assert "step-00000002: manifest.json is damaged" in said[0]
    save_checkpoint(tmp_path, state(4), 4)
    # the broken one went first
    assert entries(tmp_path) == ["step-00000001", "step-00000002.2", "step-00000004"]
    assert value(load_checkpoint(tmp_path, say=silent)) == 4


def test_a_renamed_folder(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(), 1).rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match="saved as step 1"):
        load_checkpoint(tmp_path, say=silent)


def seal(path: Path, **changes: Any) -> None:
    """Write the manifest anew as a paceline would that has these fields; None: hasn't."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["seal"]
    (path / "manifest.json").write_bytes(
        seal_manifest({name: field for name, field in manifest.items() if field is not None})
    )


def rewrite(path: Path, file: str, data: bytes) -> None:
    """Have one file of a checkpoint be these bytes, with the right hash."""
    (path / file).write_bytes(data)
    files = json.loads((path / "manifest.json").read_text())["files"]
    seal(
        path,
        files=files | {file: {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}},
    )


def test_a_newer_format_is_said_and_never_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state(1), 1)
    with monkeypatch.context() as future:
        future.setattr(checkpoint, "UNCUT_FORMAT", 3)
        save_checkpoint(tmp_path, state(2), 2)
    newer = (
        r"step-00000002: it is of a newer paceline \(format 3; this one reads up to 2\): "
        r"install a newer version to use it"
    )
    said: list[str] = []
    assert value(load_checkpoint(tmp_path, say=said.append)) == 1
    assert len(said) == 1 and re.fullmatch(
        rf"{newer}\. Using step-00000001, which is complete", said[0]
    )
    with pytest.raises(CheckpointError, match=rf"can be used: {newer}"):
        load_checkpoint(tmp_path, say=silent, step=2)
    save_checkpoint(tmp_path, state(3), 3, keep=1)
    assert entries(tmp_path) == ["step-00000002", "step-00000003"]
    assert value(load_checkpoint(tmp_path, say=silent)) == 3  # it was saved later


FOREIGN = {
    "an older format": lambda path: seal(path, format=0),
    "no format": lambda path: seal(path, format=None),
    "a format in words": lambda path: seal(path, format="new"),
    "no step": lambda path: seal(path, step=None),
    "no files": lambda path: seal(path, files=None),
    "no list of ranks": lambda path: seal(path, own=None),
    "an unknown rank": lambda path: seal(path, own=[0, 7]),
    "ranks in words": lambda path: seal(path, own=["a"]),
    "a tree without tensors": lambda path: rewrite(
        path, "state.json", b'{"version": 1, "tree": {}}'
    ),
    "a tree that is none": lambda path: rewrite(path, "state.json", b"[]"),
    "no JSON": lambda path: rewrite(path, "own-00000.json", b"{"),
    "no text": lambda path: rewrite(path, "state.json", pickle.dumps({"version": 1})),
    "a tensor that is not there": lambda path: rewrite(
        path,
        "state.json",
        b'{"version": 1, "tree": {"x": {"$": "tensor", "path": "y"}}, "tensors": {}}',
    ),
    "a kind of value that is not known": lambda path: rewrite(
        path, "state.json", b'{"version": 1, "tree": {"$": "moon"}, "tensors": {}}'
    ),
    "a dtype that is not known": lambda path: rewrite(
        path,
        "state.json",
        b'{"version": 1, "tree": {}, "tensors": {"model/weight": ["float3", [10]]}}',
    ),
    "no safetensors": lambda path: rewrite(path, "tensors.safetensors", pickle.dumps({"x": 1})),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_another_version_wrote_is_named_and_the_one_before_is_used(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hashes are right: nothing is damaged."""
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), step, own={0: state()})
    FOREIGN[kind](tmp_path / "step-00000002")
    monkeypatch.setattr(pickle, "loads", silent)
    monkeypatch.setattr(pickle, "Unpickler", silent)
    said: list[str] = []
    assert value(load_checkpoint(tmp_path, say=said.append)) == 1
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("step-00000002: ") and said[0].endswith(
        "Using step-00000001, which is complete"
    )
    with pytest.raises(CheckpointError, match="can be used: step-00000002: "):
        load_checkpoint(tmp_path, say=silent, step=2)
    save_checkpoint(tmp_path, state(3), 3)
    # one whose place can't be read may be newer, as far as can be told
    assert value(load_checkpoint(tmp_path, say=lambda text: None)) in (1, 3)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("three")
    for step in (1, 2, 3):
        save_checkpoint(folder, state(step, size=50), step, own={0: state(), 1: state(2)})
    return folder


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_of_any_files_is_found(three: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Bits that flipped, ends that are missing, files that are gone, in one or both of the
    newest two of three.
    """
    folder = Path(tempfile.mkdtemp(dir=tmp_path)) / "copy"
    shutil.copytree(three, folder)
    broken = data.draw(st.sets(st.sampled_from([2, 3]), min_size=1))
    for step in broken:
        path = folder / f"step-{step:08d}"
        for file in data.draw(st.sets(st.sampled_from(entries(path)), min_size=1, max_size=3)):
            hurt(path / file, data)
    said: list[str] = []
    found = load_checkpoint(folder, say=said.append)
    best = 2 if broken == {3} else 3 if broken == {2} else 1
    assert (found.step, value(found)) == (best, best)
    # it could be the newest, as far as can be told
    unreadable = any("step-00000002: manifest.json" in text for text in said)
    assert len(said) == (3 in broken or unreadable) and all(
        "Using step" in text and "\n" not in text for text in said
    ), said


def hurt(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    kind = data.draw(st.sampled_from(["flip", "cut", "gone", "zeros", "longer"]))
    position = data.draw(st.integers(0, len(whole) - 1))
    if kind == "gone":
        file.unlink()
        return
    damaged = bytearray(whole)
    if kind == "flip":
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        damaged = damaged[:position]
    elif kind == "zeros":  # as a disk leaves what it had no time to write
        damaged[position:] = (
            b"\xff" * len(damaged[position:])
            if not any(damaged[position:])
            else bytes(len(damaged) - position)
        )
    else:
        damaged += data.draw(st.binary(min_size=1, max_size=5))
    file.write_bytes(damaged)


def test_another_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, VersionedState(model=nn.Linear(3, 2)).take_snapshot(), 1)
    with pytest.raises(
        CheckpointError,
        match=r"model\.weight is float32\[2, 3\] in it, float32\[2, 4\] here\. Build the same model",  # noqa: E501
    ):
        VersionedState(model=nn.Linear(4, 2)).restore_snapshot(
            load_checkpoint(tmp_path, say=silent).snapshot
        )


# Interrupted
# --------------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_ignored_and_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1), 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".saving-abc" / "new")
    assert load_checkpoint(tmp_path, say=silent).step == 1
    save_checkpoint(tmp_path, state(2), 2)
    assert entries(tmp_path) == ["step-00000001", "step-00000002"]


KILLED = """
import sys, torch
from pathlib import Path
from paceline.state.snapshot import make_snapshot
from paceline.checkpoint.files.checkpoint import save_checkpoint
for step in range(1, 100_000):
    state = make_snapshot({"x": torch.full((50_000,), float(step))})
    save_checkpoint(Path(sys.argv[1]), state, step, keep=2)
    if step == 2:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    for turn in range(3):
        folder = tmp_path / str(turn)
        process = nursery.launcher(
            [sys.executable, str(script), str(folder)], cwd=tmp_path, env=os.environ
        )
        assert process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.013 * (turn + 1))
            process.kill()
            process.wait()
        found = load_checkpoint(folder, say=silent)
        assert torch.equal(
            found.snapshot.unpack_state()["x"], torch.full((50_000,), float(found.step))
        )
        save_checkpoint(folder, state(), found.step + 1, keep=1)
        assert len(entries(folder)) == 1


# A disk that refuses
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"needs to mount a small file system: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("size", [350_000, 1_000_000], ids=["second too large", "far too large"])
def test_disk_full(small: Path, size: int) -> None:
    folder = small / "checkpoints"
    save_checkpoint(folder, state(1, size=200_000), 1)
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(folder, state(2, size=size), 2)
    message = str(caught.value)
    assert message.startswith("step 2 was not saved, the disk is full: it takes ")
    assert "MB are free. Free some space or keep fewer checkpoints; step-00000001 in " in message
    assert message.endswith("is untouched")
    assert entries(folder) == ["step-00000001"]
    assert value(load_checkpoint(folder, say=silent)) == 1
    save_checkpoint(folder, state(3, size=1000), 3)  # and there is room again
    assert load_checkpoint(folder, say=silent).step == 3


@pytest.mark.parametrize(
    "where", ["disk.write_file", "disk.sync_folder", "catalogue.prune_checkpoints"]
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_any_refusal_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, code: int
) -> None:
    save_checkpoint(tmp_path, state(1), 1)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    wanted = "full" if code != errno.EIO else "Input/output error.*can be written"
    with monkeypatch.context() as broken:
        broken.setattr(f"paceline.checkpoint.files.checkpoint.{where}", refuse)
        with pytest.raises(
            CheckpointError,
            match=wanted
            if where != "catalogue.prune_checkpoints"
            else "step 2 is saved in .*older ones",
        ) as caught:
            save_checkpoint(tmp_path, state(2), 2)
    there = ["step-00000001"] + ["step-00000002"] * (where == "catalogue.prune_checkpoints")
    assert there[-1] in str(caught.value)
    assert entries(tmp_path) == there
    assert value(load_checkpoint(tmp_path, say=silent)) == len(there)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"was not saved: .*Not a directory"):
        save_checkpoint(tmp_path / "file" / "checkpoints", state(), 1)


def test_manifest_is_readable(tmp_path: Path) -> None:
    manifest = json.loads((save_checkpoint(tmp_path, state(), 5) / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["serial"]) == (1, 5, 1)
    assert set(manifest["files"]) == {"state.json", "tensors.safetensors"}
    assert list_newest(tmp_path) == [tmp_path / "step-00000005"]
