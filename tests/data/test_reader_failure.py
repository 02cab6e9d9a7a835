from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.comm.agreement import Agreement
from paceline.comm.solo import SoloGroup
from paceline.data import reader_failure
from paceline.data.loader import deal_loader
from paceline.data.reader_failure import read_batch
from paceline.errors import DataError
from tests.harness.jobs import PATIENCE


class Deadly(Dataset):
    """Its third sample ends the process that reads it."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if int(index) == 2 and torch.utils.data.get_worker_info() is not None:
            self.how()
        return torch.tensor(int(index))


class Flowing(IterableDataset):
    def __init__(self, how):
        self.how = how

    def __iter__(self):
        return (Deadly(self.how)[index] for index in range(8))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def left():
    os._exit(3)


def wrong():
    raise RuntimeError("exited unexpectedly, says the data set")


def walk(data):
    return list(deal_loader(DataLoader(data, 1, num_workers=2), Agreement(SoloGroup())))


@pytest.mark.parametrize("kind", [Deadly, Flowing])
def test_a_killed_reader_is_named(kind):
    with pytest.raises(
        DataError,
        match=r"reader \d of 2 \(pid \d+\) of the DataLoader over \w+ was killed by SIGKILL.*memory",  # noqa: E501
    ):
        walk(kind(killed))


def test_a_reader_that_leaves_is_named():
    with pytest.raises(
        DataError,
        match=r"reader 0 of 2 \(pid \d+\) of the DataLoader over Deadly ended with exit code 3",
    ):
        walk(Deadly(left))


def test_an_error_of_the_data_set_stays_what_it_is():
    with pytest.raises(RuntimeError, match="says the data set"):
        walk(Deadly(wrong))


def test_a_connection_that_broke_is_a_reader_that_is_about_to_end(monkeypatch):
    """The other end of a pipe is closed before the process is: who asks at once finds it alive."""
    monkeypatch.setattr(reader_failure, "ENDED_SECONDS", PATIENCE)
    readers = multiprocessing.get_context("fork")
    gate = readers.Event()
    reader = readers.Process(target=lambda: (gate.wait(), os._exit(7)))
    reader.start()

    class Broken:
        _workers = (reader,)

        def __next__(self):
            gate.set()
            raise ConnectionResetError("connection reset by peer")

    with pytest.raises(DataError, match=rf"reader 0 of 1 \(pid {reader.pid}\) .*exit code 7"):
        read_batch(Broken(), None)
