from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from paceline.cluster.store import Store
from paceline.comm import collectives, schedule
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy import chunks, staged_executor
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import Mismatch, UsageError, ViewChanged, WorkerLost
from paceline.native.functions import load_functions
from paceline.trace import Trace
from tests.harness.hierarchies import made, networked
from tests.harness.jobs import wait_for
from tests.harness.native_processes import Crew, heard, run, say
from tests.harness.processes import fork
from tests.harness.thread_groups import ThreadGroup, spawn

DEALT = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1, 2), (0, 0), (0, 1), (2, 0, 1, 2, 0)]


@pytest.mark.parametrize("hosts", DEALT)
@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
def test_all_reduce_for_any_dealing_of_ranks(
    hosts: tuple[int, ...], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WIDTH", 64)  # many chunks

    def data(rank: int) -> torch.Tensor:
        return torch.randn(
            numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
        )

    def body(group: ThreadGroup) -> list[torch.Tensor]:
        whole = made(group, hosts)
        x = data(group.rank)
        works = [whole.all_reduce(x), whole.all_reduce(x, op="max"), whole.all_reduce(x, op="mean")]
        found = [work.wait() for work in works]
        whole.close()
        return found

    stack = torch.stack([data(rank) for rank in range(len(hosts))])
    results = spawn(len(hosts), body, hosts=hosts)
    for found in results:
        torch.testing.assert_close(found[0], stack.sum(0))
        torch.testing.assert_close(found[1], stack.amax(0))
        torch.testing.assert_close(found[2], stack.mean(0))
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
def test_dtypes_and_layouts(dtype: torch.dtype) -> None:
    def body(group: ThreadGroup) -> torch.Tensor:
        whole = made(group, (0, 1, 0))
        x = (torch.arange(12).reshape(3, 4).t() + group.rank).to(dtype)
        assert whole.all_reduce(x, out=x).wait() is x
        whole.close()
        return x

    for found in spawn(3, body):
        assert torch.equal(found, (torch.arange(12).reshape(3, 4).t() * 3 + 3).to(dtype))


def test_halves_are_summed_in_float32_over_hosts() -> None:
    values = [2048.0, 1.0, 1.0, 0.0]

    def body(group: ThreadGroup) -> float:
        whole = made(group, (0, 1, 0, 1))
        found = (
            whole.all_reduce(torch.tensor([values[group.rank]], dtype=torch.float16)).wait().item()
        )
        whole.close()
        return float(found)

    assert spawn(4, body) == [2050.0] * 4


def test_a_mean_of_halves_may_have_a_sum_that_none_can_hold() -> None:
    def body(group: ThreadGroup) -> float:
        whole = made(group, (0, 1, 0, 1))
        found = (
            whole.all_reduce(torch.tensor([40000.0], dtype=torch.float16), op="mean").wait().item()
        )
        whole.close()
        return float(found)

    assert spawn(4, body) == [40000.0] * 4


def test_a_result_may_overlap_what_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "WIDTH", 4)

    def body(group: ThreadGroup) -> torch.Tensor:
        whole = made(group, (0, 0, 1))
        memory = torch.arange(41.0) * (group.rank + 1)
        found = whole.all_reduce(memory[:-1], out=memory[1:]).wait()
        whole.close()
        return found

    for found in spawn(3, body):
        assert torch.equal(found, torch.arange(40.0) * 6)


def test_a_later_reduction_is_summed_while_an_earlier_one_is_on_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leaders' network stands still: what is between the threads is bounded, and goes on in
    order.
    """
    monkeypatch.setattr(chunks, "WIDTH", 64)
    monkeypatch.setattr(staged_executor, "AHEAD", 640)
    gate = threading.Event()

    class Slow:
        """A group whose reductions start at once and end when the gate is open."""

        def __init__(self, outer: Group) -> None:
            self._outer, self.started = outer, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._outer, name)

        def all_reduce_agreed(self, x: torch.Tensor, **options: Any) -> Any:
            self.started += 1
            work = self._outer.all_reduce(x, **options)
            wait, work.wait = work.wait, lambda timeout=None: (gate.wait(60), wait(timeout))[1]
            return work

    def body(group: ThreadGroup) -> list[torch.Tensor]:
        whole = made(group, (0, 0, 1, 1), wrap=Slow)
        works = [
            whole.all_reduce(torch.full((64 * 4,), float(turn + group.rank))) for turn in range(5)
        ]
        if isinstance(whole.outer, Slow):
            # ten between the threads, and one that waits for room
            wait_for(lambda: whole.outer.started == 11)
            time.sleep(0.05)
            assert whole.outer.started == 11 and not works[0].done()
        group.barrier().wait()
        gate.set()
        found = [work.wait() for work in works]
        whole.close()
        return found

    for found in spawn(4, body, hosts=(0, 0, 1, 1)):
        assert [bool((x == 4 * turn + 6).all()) for turn, x in enumerate(found)] == [True] * 5


def test_one_copy_per_host_crosses_the_network_however_ranks_are_dealt() -> None:
    between = []
    for hosts in [(0, 0, 1, 1), (0, 1, 0, 1)]:

        def body(group: ThreadGroup, hosts: tuple[int, ...] = hosts) -> int:
            whole = made(group, hosts)
            before = whole.traffic.between
            whole.all_reduce_agreed(torch.ones(100_000)).wait()
            sent = whole.traffic.between - before
            whole.close()
            return sent

        between.append(sum(spawn(4, body, hosts=hosts)))
    assert between[0] == between[1] <= 2 * 400_000


def test_what_is_handed_out_counts_as_sent_within_the_host() -> None:
    def body(group: ThreadGroup) -> tuple[int, int, int]:
        whole = made(group, (0, 0, 1, 1))
        before = whole.traffic.within
        whole.all_reduce(torch.ones(1000)).wait()
        own = whole.inner.traffic.within + group.traffic.within
        found = (
            whole.traffic.within - before,
            whole.traffic.within - own,
            int(whole.outer is not None),
        )
        whole.close()
        return found

    for sent, handed, leads in spawn(4, body, hosts=(0, 0, 1, 1)):
        assert handed == 4000 * leads and sent > 0


def test_differences_are_named_before_anything_moves() -> None:
    def body(group: ThreadGroup) -> None:
        whole = made(group, (0, 1, 0))
        with pytest.raises(Mismatch, match="rank 2"):
            whole.all_reduce(torch.ones(4 if group.rank < 2 else 5))
        whole.close()

    spawn(3, body)


def test_a_closed_group_and_wrong_hosts() -> None:
    whole = HostsGroup(SoloGroup(), SoloGroup(), SoloGroup(), [0])
    assert whole.all_reduce(torch.ones(2)).wait().tolist() == [1, 1]
    assert whole.empty((2, 3), torch.float32).shape == (2, 3)
    whole.close()
    whole.close()
    with pytest.raises(ViewChanged):
        whole.all_reduce_agreed(torch.ones(2))
    with pytest.raises(UsageError, match="host of each rank"):
        HostsGroup(SoloGroup(), SoloGroup(), SoloGroup(), [0, 1])


def test_agreements_beside_pending_reductions_with_delays() -> None:
    for seed in range(10):
        dice = [random.Random(seed * 10 + rank) for rank in range(4)]

        def body(group: ThreadGroup, dice: list[random.Random] = dice) -> list[float]:
            whole = made(group, (0, 1, 0, 1))
            sums = []
            for step in range(5):
                works = []
                for part in range(3):
                    time.sleep(dice[group.rank].random() * 2e-3)
                    works.append(
                        whole.all_reduce_agreed(
                            torch.full((1000,), float(group.rank + step + part))
                        )
                    )
                assert whole.gather_bytes(bytes([step])) == [bytes([step])] * 4
                sums += [work.wait()[0].item() for work in works]
            whole.close()
            return sums

        assert (
            spawn(4, body)
            == [[6.0 + 4 * (step + part) for step in range(5) for part in range(3)]] * 4
        )


def test_an_error_inside_one_host_reaches_all_ranks_as_the_same() -> None:
    def body(group: ThreadGroup) -> tuple[int, ...]:
        whole = made(group, (0, 1, 0, 1))
        if group.rank == 3:
            group.leave("it was shot")
            return ()
        with pytest.raises(WorkerLost, match="rank 3") as caught:
            whole.all_reduce_agreed(torch.ones(5)).wait()
        whole.close()
        return caught.value.ranks

    assert spawn(4, body) == [(3,), (3,), (3,), ()]


def test_schedules_run_over_hosts() -> None:
    def body(group: ThreadGroup) -> torch.Tensor:
        whole = made(group, (0, 1, 0))
        lane = collectives.ScheduleQueue(whole)
        found = [
            lane.all_reduce(torch.full((70,), float(group.rank)), schedule.build_ring(3))
            for _ in range(3)
        ]
        result = [work.wait() for work in found][-1]
        whole.close()
        return result

    assert all(bool((result == 3).all()) for result in spawn(3, body))


def _networked(group: TorchGroup, hosts: tuple[int, ...]) -> HostsGroup:
    """A HostsGroup whose three groups are Gloo's."""
    parts = [
        group.make_subgroup([rank for rank, other in enumerate(hosts) if other == host])
        for host in sorted(set(hosts))
    ]
    [inner] = [part for part in parts if part is not None]
    return HostsGroup(
        inner,
        group.make_subgroup(sorted(hosts.index(host) for host in set(hosts))),
        group,
        hosts,
        deadline=20,
    )


def _summed(group: TorchGroup, hosts: tuple[int, ...]) -> tuple[bytes, int]:
    whole = _networked(group, hosts)
    before = whole.traffic.between
    works = [
        whole.all_reduce_agreed(
            torch.randn(600_000, generator=torch.Generator().manual_seed(10 * group.rank + k))
        )
        for k in range(3)
    ]
    assert len(group.gather_bytes(b"beside")) == group.size
    found = [work.wait() for work in works]
    between = whole.traffic.between - before
    wanted = sum(
        torch.randn(600_000, generator=torch.Generator().manual_seed(10 * rank + 2))
        for rank in range(group.size)
    )
    torch.testing.assert_close(found[2], wanted)
    whole.close()
    return found[2].numpy().tobytes(), between


@pytest.mark.slow
def test_real_processes_send_one_copy_per_host_however_they_are_dealt() -> None:
    sent = []
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1)):
        results = run(4, _summed, hosts, hosts=list(hosts))
        assert all(result == results[0][0] for result, _ in results)
        sent.append(sorted(between for _, between in results))
    assert sent[0] == sent[1] == [0, 0, 3 * 2_400_000, 3 * 2_400_000]


def _bereft(group: TorchGroup, hosts: tuple[int, ...]) -> tuple[int, ...]:
    whole = _networked(group, hosts)
    whole.all_reduce_agreed(torch.ones(1000)).wait()
    say(group, "ready")
    if group.rank == 3:
        time.sleep(600)
    heard(group, "killed")
    with pytest.raises(WorkerLost) as caught:
        whole.all_reduce_agreed(torch.ones(600_000)).wait()
    whole.close()
    return caught.value.ranks


@pytest.mark.jobs
@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 0, 0, 1)])
def test_a_killed_worker_or_leader_is_named_on_every_host(hosts: tuple[int, ...]) -> None:
    crew = Crew(4, _bereft, hosts)
    for rank in range(4):
        crew.heard(rank, "ready")
    crew.kill(3)
    for rank in range(3):
        crew.tell(rank, "killed")
    results = crew.results()
    assert results[3] is None
    assert results[:3] == [(3,)] * 3


def test_the_trace_tells_the_phases_within_and_between_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "WIDTH", 1000)

    def body(group: ThreadGroup) -> Counter[str]:
        whole = made(group, (0, 0, 1, 1), trace=Trace())
        whole.all_reduce(torch.ones(3000)).wait()
        whole.close()
        return Counter(span.kind for span in whole.trace.list_spans())

    leader, other = {"within": 6, "between": 3}, {"within": 6}
    assert spawn(4, body) == [leader, other, leader, other]


@pytest.mark.each_choice
@pytest.mark.parametrize("unlike", ["nobody", "a rank may not", "a rank has it in pieces"])
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 1, 0)])
def test_memory_that_may_move_is_summed_and_handed_out_where_it_lies(
    hosts: tuple[int, ...], unlike: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "WIDTH", 100_000)
    numel, size = 300_001, len(hosts)

    def data(rank: int, turn: int) -> torch.Tensor:
        """Whole numbers, so that sums are the same in any order."""
        return torch.randint(
            0, 1000, (numel,), generator=torch.Generator().manual_seed(100 * turn + rank)
        ).float()

    def refuse(*_: Any) -> int:
        raise AssertionError("a copy goes through the windows of the host")

    def body(rank: int, size: int, store: Store) -> None:
        whole = networked(store, rank, hosts)
        odd = rank == 1 and unlike != "nobody"
        room = (
            torch.zeros(2 * numel)[::2]
            if odd and unlike == "a rank has it in pieces"
            else torch.zeros(numel)
        )
        still = hosts[rank] == hosts[1] and unlike != "nobody"
        view, places = room[1000:2000], []
        for turn in range(5):
            room.copy_(data(rank, turn))
            if turn == 3 and not still:
                native = load_functions()
                begin = native.begin_messages
                for name in ("begin_all_reduce", "begin_reduce_scatter"):
                    monkeypatch.setattr(native, name, refuse)
                # Messages without a byte remain: ranks say that a sum lies in its place.
                monkeypatch.setattr(
                    native,
                    "begin_messages",
                    lambda *args, begin=begin: refuse() if args[-1] else begin(*args),
                )
            assert whole.all_reduce_moving(room, may_move=turn > 0 and not odd).wait() is room
            expected = sum((data(other, turn) for other in range(1, size)), data(0, turn))
            assert torch.equal(room, expected) and torch.equal(view, expected[1000:2000])
            places.append(room.data_ptr())
        assert len(set(places)) == (1 if still else 2) and places[1:] == places[1:2] * 4, (
            "it moves once, when it may"
        )
        assert room.untyped_storage().is_shared() != still
        mean = whole.all_reduce_moving(room, op="mean", may_move=True).wait()
        assert torch.equal(mean, expected)
        whole.barrier().wait()
        whole.close()

    fork(size, body)
