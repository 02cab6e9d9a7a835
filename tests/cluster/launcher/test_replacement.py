"""How long a worker that has died waits for its successor: by what it did itself, not by what
the others of its host did.
"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.cluster.hosts.elastic import ElasticPeers
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher import replacement
from paceline.cluster.launcher.replacement import Replacement
from paceline.cluster.launcher.worker import WorkerProcess


class Host:
    """A host of a job whose workers are no processes; `at` is the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        self.started: list[tuple[float, int]] = []  # when, and as which rank
        self.workers: list[WorkerProcess] = []
        monkeypatch.setattr(replacement.time, "monotonic", lambda: self.at)
        monkeypatch.setattr(replacement.time, "time", lambda: self.at)
        assembly = ElasticPeers(
            0,
            View(1, (HostSeat(0, (1, 2), {"name": "host", "address": "127.0.0.1", "port": 1}),), 1),
            {},
        )
        self.mending = Replacement(assembly, 1, 99, 600.0, self._again, say=lambda text: None)
        for rank in range(2):
            self._begin(rank)

    def _begin(self, rank: int) -> None:
        nothing: Any = None
        number = len(self.workers) + 1
        self.workers.append(
            WorkerProcess(rank, nothing, (nothing, nothing), -1, -1, -1, worker_number=number)
        )

    def _again(self, rank: int) -> None:
        self.started.append((self.at, rank))
        self._begin(rank)

    def pause(self, rank: int, trained: float | None) -> float:
        """The newest of this rank is killed after it has trained for so long (None: before it did).

        Gives the seconds until the next.
        """
        newest = [worker for worker in self.workers if worker.rank == rank][-1]
        if trained is not None:
            newest.records.append({"event": "surviving", "time": self.at})
        self.at += 20.0 if trained is None else trained
        newest.ended_at, newest.exit_code, died = self.at, 137, self.at
        before = len(self.started)
        while len(self.started) == before:
            assert self.mending.replace_ended_workers(self.workers, killed) is None
            self.at += 0.25
        assert self.started[-1][1] == rank
        return self.started[-1][0] - died


def killed(worker: WorkerProcess) -> Failure | None:
    return Failure(worker.rank, "host", 137, "was killed by SIGKILL", False, 0.0, "")


@pytest.fixture
def host(monkeypatch) -> Host:
    return Host(monkeypatch)


def test_who_dies_again_and_again_waits_longer_each_time(host):
    assert [host.pause(0, trained=1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_who_never_comes_to_train_is_not_well_however_long_it_takes(host):
    assert [host.pause(0, trained=None) for _ in range(3)] == [1, 2, 4]


def test_the_failures_of_others_do_not_count(host):
    for _ in range(4):
        host.pause(0, trained=1.0)
    assert host.pause(1, trained=1.0) == 1
    assert host.pause(0, trained=1.0) == 16


def test_what_was_is_forgotten_after_a_while_of_training(host):
    for _ in range(5):
        host.pause(0, trained=1.0)
    assert [host.pause(0, trained=seconds) for seconds in (11.0, 1.0, 11.0)] == [1, 2, 1]


def test_the_last_to_fail_ends_the_job_once_it_has_ended(host, monkeypatch):
    """The others were survived, also where the last takes long to end."""
    monkeypatch.setattr(WorkerProcess, "send_order", lambda worker, line: None)
    monkeypatch.setattr(Replacement, "_end_stopped_workers", lambda mending, workers, now: None)
    host.mending.restarts = 0
    first, second = host.workers

    def turn() -> Failure | None:
        host.mending.report_changes(host.workers)
        return host.mending.replace_ended_workers(host.workers, suspect)

    def suspect(worker: WorkerProcess) -> Failure:
        if worker is first:
            return Failure(0, "host", 137, "was killed by SIGKILL", False, 0.2, "")
        # it failed before it ended
        return Failure(1, "host", 1, "failed with exit code 1 (KeyError)", False, 3.0, "")

    first.ended_at = host.at
    assert turn() is None and host.mending.elastic_peers.view.workers == (2,)
    host.at += 1.0
    second.records.append(
        {"event": "failed", "time": host.at, "type": "KeyError", "message": "x", "is_echo": False}
    )
    assert turn() is None and host.mending.elastic_peers.view.workers == ()
    host.at += 3.0
    second.ended_at = host.at
    found = turn()
    assert found is not None and found.rank == 1
