"""What was hashed is what is in the file, whichever way it went there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.files import disk
from paceline.checkpoint.files.disk import PAGE_SIZE, sync_folder, to_byte_tensor, write_file
from paceline.checkpoint.files.file_layout import CopyMemory
from paceline.cluster.store import Store
from tests.harness.processes import fork


def held(nbytes: int, *, at: int = 0) -> Tensor:
    """Bytes that begin so far behind the beginning of a page."""
    found = CopyMemory().get_block(0, at + nbytes)[at:]
    return found.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))


PARTS = {
    "nothing": lambda: [],
    "small": lambda: [
        to_byte_tensor(b"abc"),
        torch.empty(0, dtype=torch.uint8),
        to_byte_tensor(b"defg"),
    ],
    "whole pages": lambda: [held(3 * PAGE_SIZE)],
    "a rest": lambda: [held(3 * PAGE_SIZE + 17)],
    "more than a piece": lambda: [held(disk.WRITE_SIZE + PAGE_SIZE + 1)],
    "not on a page": lambda: [held(2 * PAGE_SIZE, at=64)],
    "pages after a rest": lambda: [to_byte_tensor(b"abc"), held(2 * PAGE_SIZE)],
    "a rest after pages": lambda: [held(PAGE_SIZE), to_byte_tensor(b"abc"), held(PAGE_SIZE)],
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_hash_size_and_content(tmp_path: Path, kind: str, where: str) -> None:
    path = tmp_path / "x" if where == "disk" else Path("/dev/shm") / f"disk-test-{os.getpid()}"
    parts, moved = PARTS[kind](), list[int]()
    wanted = b"".join(part.numpy().tobytes() for part in parts)
    try:
        written = write_file(path, parts, moved=moved.append)
        assert path.read_bytes() == wanted
    finally:
        path.unlink()
    assert written == (len(wanted), hashlib.sha256(wanted).hexdigest())
    assert sum(moved) == len(wanted)


def test_pages_go_around_the_cache_and_the_rest_through_it(
    disk_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways, real = list[tuple[bool, int]](), os.write

    def watched(file: int, data: memoryview) -> int:
        ways.append((bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return real(file, data)

    monkeypatch.setattr(os, "write", watched)
    write_file(disk_path / "x", [held(2 * PAGE_SIZE + 5), to_byte_tensor(b"abc")])
    assert ways == [(True, 2 * PAGE_SIZE), (False, 5), (False, 3)]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
def test_a_disk_that_takes_only_what_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    part, real = held(disk.WRITE_SIZE + 2 * PAGE_SIZE), os.write

    def refuse(file: int, data: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(file, data[:1000])  # and takes little at a time

    monkeypatch.setattr(os, "write", refuse)
    assert write_file(tmp_path / "x", [part]).nbytes == part.nbytes
    assert (tmp_path / "x").read_bytes() == part.numpy().tobytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL])
def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(file: int, data: memoryview) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)

    # in a process of its own: nobody else opens and closes files there
    def body(rank: int, size: int, store: Store) -> None:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match=os.strerror(code)):
            write_file(tmp_path / "x", [held(2 * PAGE_SIZE)])
        assert len(os.listdir("/proc/self/fd")) == len(before)

    fork(1, body)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", [to_byte_tensor(b"new")])
    sync_folder(tmp_path)
    assert (tmp_path / "x").read_text() == "old"


def test_it_is_on_the_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[str]()
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    write_file(tmp_path / "x", [to_byte_tensor(b"abc")])
    sync_folder(tmp_path)
    assert synced == [str(tmp_path / "x"), str(tmp_path)]
