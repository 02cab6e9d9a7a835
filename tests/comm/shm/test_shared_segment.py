from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm.shm import shared_segment
from paceline.comm.shm.shared_segment import (
    LARGE,
    PAGE,
    SharedSegment,
    discard_pages,
    empty_on_cpu,
    make_shared_segment,
    make_writes_private,
)
from paceline.errors import ResourceError
from tests.harness.processes import fork, threads


def test_bytes_are_shared_and_zero_at_first() -> None:
    one = SharedSegment.create(10_000)
    other = SharedSegment.open(one.address, 10_000)
    one.seal()
    assert one.start != other.start and bool(
        (other.view_tensor(0, (10_000,), torch.uint8) == 0).all()
    )
    one.view_tensor(8, (3, 2), torch.float32).copy_(torch.arange(6.0).view(3, 2))
    assert torch.equal(other.view_tensor(8, (6,), torch.float32), torch.arange(6.0))
    other.view_bytes().cast("q")[0] = -5
    assert one.view_tensor(0, (), torch.int64).item() == -5
    assert one.view_tensor(0, (0, 3), torch.int64).shape == (0, 3)


def test_a_segment_mapped_again_has_the_same_bytes_and_outlives_the_first_mapping() -> None:
    segment = SharedSegment.create(8192)
    again = segment.map_again()
    segment.seal()
    x = torch.empty(0, dtype=torch.float32).set_(again, 0, (2048,), (1,))
    segment.view_tensor(0, (2048,), torch.float32).fill_(3)
    assert again.data_ptr() != segment.start and again.nbytes() == 8192 and bool((x == 3).all())
    del segment, again
    gc.collect()
    assert bool((x.add_(1) == 4).all())


def test_discarded_pages_read_as_zeros_and_what_lies_beside_them_stays() -> None:
    x = torch.ones(3 * PAGE, dtype=torch.uint8)
    discard_pages(x.data_ptr() + 1, x.numel() - 2)
    first = -x.data_ptr() % PAGE
    assert x[0] == x[-1] == 1 and bool((x[first or PAGE : (first or PAGE) + PAGE] == 0).all())
    assert bool((x.fill_(2) == 2).all())
    discard_pages(x.data_ptr(), 10)  # less than a page
    assert bool((x == 2).all())


def test_what_a_process_keeps_to_itself_is_seen_by_nobody_else() -> None:
    segment = SharedSegment.create(2 * PAGE)
    again = segment.map_again()
    here, there = (
        torch.empty(0, dtype=torch.uint8).set_(again, 0, (2 * PAGE,), (1,)),
        segment.view_tensor(0, (2 * PAGE,), torch.uint8),
    )
    there.fill_(1)
    make_writes_private(again.data_ptr(), again.nbytes(), again._get_shared_fd())
    here[5] = 7
    assert here[5] == 7 and here[0] == 1 and bool((there == 1).all())
    there.fill_(2)
    assert here[0] == 1 and here[PAGE] == 2, (
        "a page that was written stays, another shows what there is"
    )
    with pytest.raises(ResourceError, match="can't be mapped again"):
        make_writes_private(again.data_ptr() + 1, PAGE, again._get_shared_fd())
    segment.seal()


def test_tensors_outlive_the_segment_and_nothing_else_is_held() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(
            "memfd:paceline"
        )

    # in a process of its own: nobody else opens and closes files there
    def body(rank: int, size: int, store: Store) -> None:
        before = held()
        segment = SharedSegment.create(1 << 20)
        segment.seal()
        x, cells = segment.view_tensor(4096, (100,), torch.float32), segment.view_bytes()
        del segment
        gc.collect()
        x += 1
        assert x.sum() == 100 and cells[4098] != 0 and held() == (before[0], before[1] + 1)
        del x, cells
        gc.collect()
        assert held() == before

    gc.collect()
    fork(1, body)


@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (LARGE // 4 - 1,), (LARGE // 4,), (3, LARGE // 4 + 7)]
)
def test_fresh_memory_is_ordinary_memory(shape: tuple[int, ...]) -> None:
    around = [torch.zeros(LARGE // 4) for _ in range(3)]
    tensor = empty_on_cpu(shape, torch.float32)
    assert tensor.shape == shape and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert bool((tensor.fill_(2) == 2).all()) and not any(bool(other.any()) for other in around)


def test_what_can_not_be_had_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError,
        match=r"1048576 MiB of shared memory can't be had \(.*; .* has \d+ MiB free\); .*shm-size",
    ):
        SharedSegment.create(1 << 40, folder=str(tmp_path))
    with pytest.raises(ResourceError, match="No such file"):
        SharedSegment.create(4096, folder=str(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []
    segment = SharedSegment.create(4096, folder=str(tmp_path))
    with pytest.raises(ResourceError, match="another size than the 8192 bytes"):
        SharedSegment.open(segment.address, 8192)
    segment.seal()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="can't be mapped"):
        SharedSegment.open(segment.address, 4096)


def meeting(store: Store, rank: int, size: int) -> object:
    turn = 0

    def meet(word: str) -> list[str]:
        nonlocal turn
        turn += 1
        store.put(f"{turn}/{rank}", word)
        return [store.take(f"{turn}/{r}") for r in range(size)]

    return meet


def test_share() -> None:
    def body(rank: int, size: int, store: Store) -> None:
        segment = make_shared_segment(
            8192, rank, 2, meeting(store, rank, size), inside=rank != 1, folder=None
        )  # type: ignore[arg-type]
        assert (segment is None) == (rank == 1)
        if segment is not None:
            segment.view_tensor(8 * rank, (1,), torch.int64).fill_(rank + 1)
            while segment.view_tensor(0, (3,), torch.int64).tolist() != [1, 0, 3]:
                pass

    fork(3, body)


def test_a_file_serves_where_an_anonymous_one_can_not_be_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        SharedSegment, "address", property(lambda self: self._path or "/proc/1/fd/none")
    )
    monkeypatch.setattr(shared_segment, "SHM", str(tmp_path))

    def body(rank: int, size: int, store: Store) -> bool:
        segment = make_shared_segment(
            8192, rank, 0, meeting(store, rank, size), inside=True, folder=None
        )  # type: ignore[arg-type]
        assert segment is not None
        return bool((segment.view_tensor(0, (8192,), torch.uint8) == 0).all())

    assert threads(2, body) == [True, True]
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_one_is_raised_by_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def body(rank: int, size: int, store: Store) -> None:
        for folder in (str(tmp_path), str(tmp_path / "missing")):
            if rank == 1 and not folder.endswith("missing"):
                monkeypatch.setattr(
                    SharedSegment,
                    "open",
                    lambda *_, **__: (_ for _ in ()).throw(ResourceError("not here")),
                )
            with pytest.raises(ResourceError, match=r"not here|No such file"):
                meet = meeting(store.open_substore(folder), rank, size)
                make_shared_segment(8192, rank, 0, meet, inside=True, folder=folder)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == [] or rank != 0

    fork(2, body)
    assert list(tmp_path.iterdir()) == []
