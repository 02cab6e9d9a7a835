from __future__ import annotations

import gc
import random
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm.p2p.message_blocks import BlockPool, MessageReader
from paceline.comm.p2p.pair_message import pack_header
from paceline.comm.shm.shared_segment import SharedSegment


class Counted:
    """Makes segments, and counts them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.made, self.folder = 0, folder

    def __call__(self, nbytes: int) -> SharedSegment:
        self.made += 1
        return SharedSegment.create(
            nbytes, folder=None if self.folder is None else str(self.folder)
        )


def sent(pool: BlockPool, reader: MessageReader, *tensors: Tensor) -> tuple[Tensor, ...]:
    entry = pool.write_message(pack_header(3, {"a": len(tensors)}, tensors), tensors)
    pool.mark_told(entry)
    lane, message = reader.read_message(entry)
    assert lane == 3 and message.head == {"a": len(tensors)}
    return message.tensors


def test_messages_of_all_sizes_and_layouts_arrive() -> None:
    pool, reader, dice = BlockPool(Counted()), MessageReader(), random.Random(2)
    kept: list[tuple[Tensor, Tensor]] = []
    for number in range(300):
        x = (
            torch.arange(dice.choice((0, 1, 50, 5000, 100_000)))
            .add(number)
            .to(dice.choice((torch.uint8, torch.float32, torch.complex128)))
        )
        x = x[: len(x) // 2 * 2].view(2, -1).t() if dice.random() < 0.5 else x
        x = x.conj() if dice.random() < 0.3 else x
        for came in sent(pool, reader, x, x[:1])[:1]:
            assert came.is_contiguous() and not came.is_conj() and torch.equal(came, x)
            if dice.random() < 0.3:
                kept.append((came, x))  # while others come and go
    assert all(torch.equal(came, x) for came, x in kept)


def test_a_block_is_used_again_once_no_tensor_lies_in_it() -> None:
    make = Counted()
    pool, reader = BlockPool(make), MessageReader()
    for number in range(20):
        [came] = sent(pool, reader, torch.full((100_000,), float(number)))
        row = came[5:10]
        del came
        assert row.tolist() == [number] * 5
    assert make.made <= 2  # a row of the last one was still there
    held = [sent(pool, reader, torch.full((100_000,), float(number)))[0] for number in range(6)]
    assert [int(x[-1]) for x in held] == [*range(6)]
    made = make.made
    del held, row
    gc.collect()
    for number in range(60):
        # smaller ones fit, too
        sent(pool, reader, torch.full((100_000 - 300 * number,), float(number)))
    assert make.made == made


def test_a_small_tensor_that_is_kept_holds_no_block() -> None:
    make = Counted()
    pool, reader = BlockPool(make), MessageReader()
    kept = [sent(pool, reader, torch.full((100,), number))[0] for number in range(2000)]
    assert [int(x[0]) for x in kept] == [*range(2000)] and make.made == 1


def test_a_tensor_outlives_both_ends_and_an_evaluation() -> None:
    pool, reader = BlockPool(Counted()), MessageReader()
    with torch.inference_mode():
        [x] = sent(pool, reader, torch.ones(100_000))
    pool.close()
    del pool, reader
    gc.collect()
    weight = torch.ones(100_000, requires_grad=True)
    (x * weight).sum().backward()  # an inference tensor could not be saved for backward
    assert torch.equal(x, torch.ones(100_000))


def test_named_memory_has_lost_its_name_once_it_is_mapped(tmp_path: Path) -> None:
    pool, reader = BlockPool(Counted(tmp_path)), MessageReader()
    entry = pool.write_message(pack_header(0, {}, [torch.ones(3)]), [torch.ones(3)])
    assert [*tmp_path.iterdir()]
    assert reader.read_message(entry)[1].tensors[0].tolist() == [1, 1, 1]
    assert not [*tmp_path.iterdir()]
    pool.close()
