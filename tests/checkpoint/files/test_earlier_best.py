"""The best of an earlier run comes along, is never taken for the newest, and outlives the run it
came from.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files import catalogue, checkpoint, disk
from paceline.checkpoint.files.earlier_best import inherit_best
from paceline.errors import CheckpointError
from tests.harness.measured_checkpoints import names, save


def refuse(code: int) -> Callable[..., Any]:
    def refusing(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refusing


@pytest.mark.parametrize("links", [True, False])
def test_it_comes_along(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    old, new = tmp_path / "old", tmp_path / "new"
    for step, value in ((3, 0.2), (5, 0.4)):
        save(old, step, value)
    save(new, 9, 0.3, keep=1)
    assert inherit_best(new, old) == new / "step-00000003"
    assert (old / "step-00000003" / "tensors.safetensors").stat().st_nlink == (2 if links else 1)
    shutil.rmtree(old)
    assert checkpoint.load_checkpoint(new, say=print).step == 9  # the newest is its own
    assert checkpoint.load_checkpoint(new, say=print, best=True).step == 3
    save(new, 10, 0.25, keep=1)
    assert names(new) == ["step-00000003", "step-00000010"]
    save(new, 11, 0.1, keep=1)
    assert names(new) == ["step-00000011"]


def test_it_comes_once_and_only_where_it_is_the_best(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("old", "new", "other"))
    assert inherit_best(new, old) is None
    save(old, 3, 0.2)
    save(new, 9, 0.1)
    assert inherit_best(new, old) is None  # what is there is better
    save(other, 9, 0.1, "max")
    assert inherit_best(other, old) is None  # measured by something else
    equal = tmp_path / "equal"
    save(equal, 9, 0.2)
    # of equals the earlier
    assert inherit_best(equal, old) is not None and catalogue.list_best(equal)[0].step == 3
    assert inherit_best(equal, old) is None and names(equal) == ["step-00000003", "step-00000009"]
    save(tmp_path / "plain", 9)
    assert (
        inherit_best(tmp_path / "plain", old) is not None
        and checkpoint.load_checkpoint(tmp_path / "plain", say=print).step == 9
    )


@pytest.mark.parametrize("where", ["os.link", "disk.sync_folder"])
def test_a_disk_that_refuses_leaves_nothing(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save(old, 3, 0.2)
    save(new, 9, 0.3)
    monkeypatch.setattr(
        os if where == "os.link" else disk, where.split(".")[1], refuse(errno.ENOSPC)
    )
    with pytest.raises(
        CheckpointError,
        match=(
            r"the best checkpoint so far, .*old/step-00000003, can't be copied to .*No space "
            r"left"
        ),
    ):
        inherit_best(new, old)
    assert names(new) == ["step-00000009"]


def test_links_in_the_earlier_run_are_not_followed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    path = save(old, 3, 0.2) / "state.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    save(new, 9, 0.3)
    with pytest.raises(CheckpointError, match=r"state.json is no file, but a link"):
        inherit_best(new, old)
    assert names(new) == ["step-00000009"]
