"""What only one worker has is in a buddy's memory: on threads, whoever is lost just stops; and
in whole jobs, where it is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.cluster.topology import Topology
from paceline.codec.codec import error_feedback
from paceline.codec.dense import int8
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import topk
from paceline.elastic import replicator as carrying
from paceline.elastic.buddies import BuddyReplication
from paceline.errors import ViewChanged
from paceline.session.run import Run
from paceline.state.snapshot import make_snapshot
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.outer import nesterov
from paceline.sync.localsgd.strategy import LocalSGD, LocalSGDSync
from paceline.sync.per_axis import PerAxisSync
from paceline.sync.per_axis import Sequence as Both
from paceline.workers.copy_interval import Replicate
from tests.harness.jobs import PATIENCE, Jobs
from tests.harness.runs import batches, cut, parameters, workers
from tests.harness.survivors import play
from tests.harness.thread_groups import ThreadGroup

NAMES = (70, 71, 72, 73, 74, 75)  # of the ranks at the start
LOSSY = AllReduce(codec=error_feedback(topk(0.1)))


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    generator = torch.Generator().manual_seed(3)  # threads share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4)
    return made


@dataclass
class Training:
    """A run on threads whose workers have buddies, though nobody can be lost in it."""

    run: Run
    net: nn.Module
    buddies: BuddyReplication
    said: list[str]

    @classmethod
    def begin(cls, run: Run, replicate: Replicate) -> Training:
        said: list[str] = []
        run._context.announce = said.append
        buddies = BuddyReplication(
            run._context, run._own.abilities.unreplicated, run._loop, replicate
        )
        run._loop.observe(replace(run._loop.observers, committed=(buddies.copy_if_due,)))
        return cls(run, model(), buddies, said)

    def steps(
        self,
        count: int,
        at: Callable[[int], None] = lambda step: None,
        meets: Sequence[int] = (1,),
        **options: Any,
    ) -> None:
        """Train; `at` is called at the start of each turn, with the steps taken, and workers
        meet after those of `meets`.
        """
        opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        net, opt, loader = self.run.prepare(self.net, opt, batches(160), **options)
        for x, y in loader:
            if self.run.steps in meets:
                figures = msgpack.packb(self.buddies.collect_news())
                agreement = self.run._agreement
                self.buddies.hear_news(
                    [msgpack.unpackb(found) for found in agreement.meet("figures", figures)],
                    NAMES[: self.run.size],
                )
            at(self.run.steps)
            if self.run.steps == count:
                self.whole()
                return
            F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()

    def whole(self) -> None:
        """Wait until what is on its way has come."""
        if self.buddies.replicator is not None:
            assert (
                self.buddies.replicator.wait_for_transfer(PATIENCE)
                and self.buddies.replicator.can_send
            )

    def regroup(self, ranks: Sequence[int]) -> str:
        """Go on with these ranks; gives what is said of the others."""
        context = self.run._context
        before = self.buddies._worker_numbers
        names = tuple(self.buddies._worker_numbers[rank] for rank in ranks)
        layout = self.run._own.sync.join_info()
        group = context.group.make_subgroup(ranks)
        if group is None:
            return ""
        context.leave_groups()
        context.group, context.hosts = group, tuple(context.hosts[rank] for rank in ranks)
        context.agreement.regroup(group, ("here",) * len(ranks), tuple(range(len(ranks))))
        self.run._own.sync.regroup(context, layout)
        self.buddies.regroup(names)
        return self.buddies.describe_fates(before)


def trained(
    size: int,
    body: Callable[[Training], Any],
    strategy: Strategy,
    *,
    replicate: Replicate = 1,
    hosts: tuple[int, ...] = (),
) -> list[Any]:
    """What `body` gives on each worker of a run; each has a host of its own unless `hosts` says
    otherwise.
    """

    def work(run: Run) -> Any:
        whole = run.group
        found = body(Training.begin(run, replicate))
        whole.barrier().wait()
        run._ending.free_resources(failed=False)  # together: the workers may have come apart
        return found

    return workers(size, work, strategy=strategy, hosts=hosts or tuple(range(size)))


def kept(states: Iterable[dict[str, Any]]) -> Tensor:
    """All residuals."""
    return torch.cat([state["residual"].double() for state in states])


def residual(run: Run) -> Tensor:
    """All that a codec has kept here."""
    sync: Any = run._own.sync
    coded = sync._rounds._exchange.codecs if isinstance(sync, LocalSGDSync) else sync._coded
    return kept(coded.states)


# ---- on threads


@pytest.mark.parametrize("codec", [topk(0.1), int8(block=16), powersgd(1)], ids=repr)
def test_what_a_codec_had_kept_of_gradients_is_none_the_less(codec: Any) -> None:
    def body(each: Training) -> Any:
        each.steps(7)
        before = residual(each.run)
        return before, each.regroup((0, 2)), residual(each.run)

    found = trained(3, body, AllReduce(codec=error_feedback(codec)))
    total = sum(before for before, _, _ in found)
    assert float(total.norm()) > 0
    torch.testing.assert_close(found[0][2] + found[2][2], total, rtol=1e-6, atol=1e-8)
    assert torch.equal(found[0][2], found[0][0]), "the next host has it"
    assert [text for _, text, _ in found] == [
        told := "; what it alone had is kept by rank 1, as of step 7 (0 steps ago)",
        "",
        told,
    ]


def test_a_turn_that_has_its_gradients_already_makes_something_of_it_too() -> None:
    """What counts then is what a codec keeps after this turn."""

    def body(each: Training) -> Any:
        found: list[Any] = []

        def lose(step: int) -> None:
            if step == 6:
                F.mse_loss(
                    each.net(torch.ones(2, 6).double()), torch.zeros(2, 2).double()
                ).backward()
                each.whole()
                coded = each.run._own.sync._coded  # type: ignore[attr-defined]
                found.extend([residual(each.run), kept(coded._next_states.values())])
                found.extend(
                    [each.regroup((0, 1)), residual(each.run), kept(coded._next_states.values())]
                )

        each.steps(6, lose)
        return found

    _, _, told, _, _ = found = trained(3, body, LOSSY)[0]
    assert told == "; what it alone had is kept by rank 0, as of step 6 (1 step ago)"
    taken = found[3] - found[0]
    assert float(taken.norm()) > 0
    torch.testing.assert_close(found[4] - found[1], taken)


def test_the_next_host_has_what_each_owner_had() -> None:
    def body(each: Training) -> Any:
        each.steps(5)
        return each.buddies.shelf.held_steps, each.regroup((0, 1, 3, 4, 5))

    found = trained(6, body, LOSSY, hosts=(0, 0, 1, 1, 2, 2))
    assert [held for held, _ in found] == [{NAMES[owner]: 5} for owner in (4, 5, 0, 1, 2, 3)]
    assert found[0][1] == "; what it alone had is kept by rank 3, as of step 5 (0 steps ago)"


def test_two_that_are_no_buddies_may_be_lost_at_once_and_a_pair_may_not() -> None:
    def body(each: Training, left: tuple[int, ...]) -> str:
        each.steps(4)
        return each.regroup(left)

    apart = trained(4, lambda each: body(each, (1, 3)), LOSSY)
    assert (
        apart[1]
        == apart[3]
        == (
            "; what rank 0 alone had is kept by rank 0, as of step 4 (0 steps ago)"
            "; what rank 2 alone had is kept by rank 1, as of step 4 (0 steps ago)"
        )
    )
    pair = trained(4, lambda each: body(each, (0, 3)), LOSSY)
    assert (
        pair[0]
        == pair[3]
        == (
            "; what rank 1 alone had is lost; what rank 2 alone had is kept by rank 1, as of step "
            "4 (0 steps ago)"
        )
    )


def test_one_who_had_taken_something_over_is_lost_before_it_was_copied_again() -> None:
    def body(each: Training) -> list[str]:
        each.steps(4)
        return [
            each.regroup((0, 1, 3)),
            each.regroup((0, 1)) if each.run._context.group.size == 3 else "",
        ]

    found = trained(4, body, LOSSY)
    assert found[0] == [
        "; what it alone had is kept by rank 2, as of step 4 (0 steps ago)",
        (
            "; what it alone had is kept by rank 0, as of step 4 (0 steps ago); "
            "what it had taken over since is lost"
        ),
    ]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_round_has_what_a_lost_worker_had_changed(lost: int) -> None:
    """By hand: its change counts by the part of the samples that it had while it lived, and in
    the divisor by what that is of the round.
    """
    strategy, ratios = LocalSGD(8), (1, 2, 5)

    def body(each: Training) -> Any:
        sync = each.run._own.sync
        rounds = sync._rounds  # type: ignore[attr-defined]
        each.steps(5, shares=cut(*ratios))
        unit = rounds.units[0]
        start = unit.start.clone()
        change = rounds._exchange.compute_change(unit, unit.bucket.flat).clone()
        told = each.regroup(tuple(rank for rank in range(3) if rank != lost))
        if each.run._context.group.size == 2:
            for turn in rounds._fragments:
                # three more steps, of equal shares, that change nothing
                turn.steps_made, turn.sample_parts = turn.steps_made + 3, turn.sample_parts + 3 / 2
            each.run._context.group.barrier().wait()
            sync.converge()
        return start, change, told, rounds.units[0].start

    found = trained(3, body, strategy, replicate=1)
    start, told = found[0][0], found[0][2]
    assert told.startswith("; what it alone had is kept by rank ") and told.endswith(
        "as of step 5 (0 steps ago)"
    )
    parts = [ratio / 8 for ratio in ratios]
    living = [rank for rank in range(3) if rank != lost]
    weights = {rank: (5 * parts[rank] + 3 / 2) / 8 for rank in living}
    moved = sum(weights[rank] * found[rank][1] for rank in living) + parts[lost] * found[lost][1]
    wanted = start + moved / (sum(weights.values()) + 5 * parts[lost] / 8)
    for rank in living:
        torch.testing.assert_close(found[rank][3], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [LocalSGD(8), LocalSGD(8, outer=nesterov(0.7, 0.9)), LocalSGD(6, fragments=2, delay=2)],
    ids=repr,
)
def test_a_round_that_ends_at_once_is_that_of_a_run_in_which_nobody_was_lost(
    strategy: LocalSGD,
) -> None:
    def body(each: Training, left: tuple[int, ...]) -> Tensor:
        each.steps(5)
        each.regroup(left)
        if each.run.rank in left:
            each.run._own.sync.converge()
        return parameters(each.net)

    wanted, found = (
        trained(3, lambda each, left=left: body(each, left), strategy)
        for left in ((0, 1, 2), (0, 1))
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0], found[1])


def test_what_a_codec_had_kept_of_changes_is_none_the_less() -> None:
    def body(each: Training) -> Any:
        each.steps(7)
        before = residual(each.run)
        return before, each.regroup((0, 1)), residual(each.run)

    found = trained(3, body, LocalSGD(3, codec=error_feedback(topk(0.1))))
    torch.testing.assert_close(found[0][2] + found[1][2], sum(before for before, _, _ in found))
    assert torch.equal(found[1][2], found[1][0]) and not torch.equal(found[0][2], found[0][0])


def test_who_carries_something_has_that_copied_too() -> None:
    """Of two that are lost one after the other, both are in the round."""

    def body(each: Training, *lefts: tuple[int, ...]) -> Tensor:
        each.steps(5)
        for left in lefts:
            inside = each.run._context.group.rank in left
            each.regroup(left)
            if not inside:
                return parameters(each.net)
            each.buddies.copy_if_due(each.buddies._first_copied_step)
            each.whole()
        each.run._own.sync.converge()
        return parameters(each.net)

    wanted = trained(4, lambda each: body(each, (0, 1, 2, 3)), LocalSGD(8))
    # rank 3 has what rank 2 had
    found = trained(4, lambda each: body(each, (0, 1, 3), (0, 1)), LocalSGD(8))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("steps", "says"), [(3, "is kept by rank 0, as of step 3 (0 steps ago)"), (5, "is lost")]
)
def test_what_a_round_has_had_since_is_out_of_date(steps: int, says: str) -> None:
    """There was a copy after step 3, and the round has ended after step 4."""

    def body(each: Training) -> str:
        each.steps(steps)
        return each.regroup((0, 1))

    assert trained(3, body, LocalSGD(4), replicate=3)[0] == f"; what it alone had {says}"


def test_one_strategy_inside_hosts_and_another_between() -> None:
    """What a host's only worker has changed since the last round is in the next one."""

    def body(each: Training, left: tuple[int, ...]) -> Tensor:
        each.steps(5)
        each.regroup(left)
        if each.run.rank in left:
            each.run._own.sync.converge()
        return parameters(each.net)

    strategy = Both((AllReduce(), "local"), (LocalSGD(8), "host"))
    wanted, found = (
        trained(3, lambda each, left=left: body(each, left), strategy, hosts=(0, 0, 1))
        for left in ((0, 1, 2), (0, 1))
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)


class SecondLoss:
    """Loses another worker at the call number `at` (counted from 0) of rank 1 in the group that
    rank 0 and rank 1 go on in.
    """

    def __init__(self, at: int) -> None:
        self.came = False  # it was lost; else there were fewer calls
        self._at, self._calls = at, itertools.count()
        self._groups: list[ThreadGroup] = []
        self._done = False
        self._over = threading.Barrier(2)

    def go_on(self, group: ThreadGroup, act: Callable[[ThreadGroup], None]) -> bool:
        """Call `act` with the group. Returns whether a worker was lost, on both ranks."""
        thread = threading.current_thread()

        def lose(_: int) -> None:
            if (
                threading.current_thread() is thread
                and not self._done
                and next(self._calls) == self._at
            ):
                self.came = True
                self._break()
                raise ViewChanged("another worker was lost meanwhile")

        group._delay = lose if group.rank == 1 else self._follow
        self._groups.append(group)
        with contextlib.suppress(ViewChanged):
            act(group)
        self._over.wait(PATIENCE)
        self._done = True  # groups that were made in this one go on calling
        self._over.wait(PATIENCE)
        return self.came

    def _follow(self, _: int) -> None:
        if self.came and not self._done:  # groups that were made since are broken, too
            self._break()

    def _break(self) -> None:
        for group in self._groups:
            for each in (group, *group._children):
                each.abort()


SURVIVING = [
    LOSSY,
    LocalSGD(8),
    LocalSGD(8, outer=nesterov(0.7, 0.9), codec=error_feedback(topk(0.1))),
    LocalSGD(8, fragments=2, delay=2),
    LocalSGD(4, after=3),
    Both((AllReduce(), "local"), (LocalSGD(8), "host")),
]


@pytest.mark.parametrize("strategy", SURVIVING, ids=repr)
def test_a_loss_while_another_is_survived_changes_nothing(strategy: Strategy) -> None:
    """Wherever in the forming of new groups it comes: all go on from what they had before, and
    carry what was lost once.
    """

    def body(each: Training, second: Sequence[SecondLoss]) -> Any:
        each.steps(5)
        context, sync = each.run._context, each.run._own.sync
        pair, times = context.group.make_subgroup((0, 1)), 0
        if pair is None:
            return None
        left = Topology(each.run._view.cluster.hosts[:2])
        for loss in second:

            def regroup(group: ThreadGroup) -> None:
                context.leave_groups()
                context.group, context.hosts = group, (0, 1)
                context.agreement.regroup(group, ("here",) * 2, (0, 1))
                each.run._view.move_to_view(replace(each.run._view.worker, cluster=left))
                each.run._prepared.regroup_layers()
                sync.regroup(context)  # type: ignore[attr-defined]
                each.buddies.regroup(NAMES[:2])

            group = pair.make_subgroup((0, 1))
            assert isinstance(group, ThreadGroup)
            times += loss.go_on(group, regroup)
            if not loss.came:
                break
        found = each.run._own.abilities.unreplicated
        assert found is not None
        state = make_snapshot([found.unreplicated_state(), sync.state_dict()]).compute_sha256()
        if isinstance(sync, LocalSGDSync | PerAxisSync):
            sync.converge()
        return times, state, parameters(each.net), each.buddies.describe_fates(NAMES[:3])

    never, anywhere = [SecondLoss(-1)], [SecondLoss(at) for at in range(100)]
    wanted, found = (
        trained(3, lambda each, second=second: body(each, second), strategy)
        for second in (never, anywhere)
    )
    assert wanted[0][0] == 0 and found[0][0] == found[1][0] > 4
    for rank in range(2):
        assert torch.equal(found[rank][2], wanted[rank][2]) and (
            found[rank][1],
            found[rank][3],
        ) == (wanted[rank][1], wanted[rank][3])


def test_how_often_there_are_copies_follows_from_what_all_have_measured() -> None:
    def body(each: Training) -> Any:
        each.steps(3)
        buddies, seen = each.buddies, []
        assert buddies.replicator is not None and buddies.replicator.complete_step == 2, (
            "one copy, to measure what it takes"
        )
        assert buddies.steps_between_copies is None and not buddies._is_due(3)
        for busy in (0.003, 0.04, 0.03, 0.025, 0.019, 0.011, 0.5, 0.009):
            figures = (
                [0.001, 0.001, 0.1, 4_000_000],
                [busy / 3, busy * 2 / 3, 0.1, 3_000_000],
                [0.0, 0.002, 0.1, 0],
            )
            buddies.hear_news([[buddies._first_copied_step, *each] for each in figures], NAMES[:3])
            seen.append(buddies.steps_between_copies)
        assert [step for step in range(95, 101) if buddies._is_due(step)] == [96, 98, 100]
        buddies.hear_news(
            [[buddies._first_copied_step, 0.001, 0.04, 0.1, 4_000_000]] * 3, NAMES[:3]
        )
        assert [step for step in range(1, 25) if buddies._is_due(step)] == [2, 6, 12, 18, 24]
        buddies.hear_news(
            [[buddies._first_copied_step - 1, 0.001, 4.0, 0.1, 4_000_000]] * 3, NAMES[:3]
        )
        assert buddies.steps_between_copies == 6, "figures of other workers than these say nothing"
        return seen, [text for text in each.said if "buddy" in text]

    for seen, said in trained(3, body, LOSSY, replicate="auto"):
        assert seen == [1, 5, 5, 5, 5, 2, 63, 2]
        assert said[0].startswith("buddy snapshots every step: ")
        assert said[1] == (
            "buddy snapshots every 5 steps: 4 MB, for which a step stands still for 0.013 s and "
            "which are on their way for 0.027 s, beside steps of 0.100 s (at most 10% of the time)"
        )


def test_every_so_many_steps_is_what_was_said_whatever_it_costs() -> None:
    def body(each: Training) -> Any:
        each.steps(3)
        each.buddies.hear_news(
            [[each.buddies._first_copied_step, 0.001, 4.0, 0.1, 4_000_000]] * 3, NAMES[:3]
        )
        return each.buddies.steps_between_copies, [
            step for step in range(1, 12) if each.buddies._is_due(step)
        ]

    assert trained(3, body, LOSSY, replicate=3) == [(3, [2, 3, 6, 9])] * 3


@pytest.mark.parametrize(
    ("replicate", "hosts", "copies"),
    [("auto", (0, 0, 0), 0), ("auto", (0, 1, 1), 3), (2, (0, 0, 0), 3), ("off", (0, 1, 2), 0)],
)
def test_when_there_are_copies(replicate: Replicate, hosts: tuple[int, ...], copies: int) -> None:
    def body(each: Training) -> Any:
        each.steps(4)
        held = each.buddies.shelf.held_steps
        return held, each.regroup((0, 2))

    found = trained(3, body, LOSSY, replicate=replicate, hosts=hosts)
    assert sum(len(held) for held, _ in found) == copies
    assert ("is kept" in found[0][1]) == bool(copies)


def test_who_leaves_lets_its_last_copy_come(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = carrying.pack_copy

    def slowly(state: Any, step: int) -> Any:
        threading.Event().wait(0.2 * (step == 5))
        return wrap(state, step)

    monkeypatch.setattr(carrying, "pack_copy", slowly)

    def body(each: Training) -> Any:
        each.steps(5, lambda step: each.buddies.finish_sending() if step == 5 else None)
        return each.buddies.shelf.held_steps

    monkeypatch.setattr(Training, "whole", lambda each: None)
    assert sorted(step for held in trained(3, body, LOSSY) for step in held.values()) == [5, 5, 5]


def test_what_a_copy_sends_counts_as_sent() -> None:
    def body(each: Training) -> int:
        each.steps(9)
        sent = each.run._loop.clock.sent
        return sent.within + sent.between

    with_copies, without = (
        trained(2, body, LOSSY, replicate=replicate) for replicate in (2, "off")
    )
    size = sum(p.numel() for p in model().parameters()) * 4
    assert 3 * size < with_copies[0] - without[0] < 5 * size


@pytest.mark.parametrize(
    "strategy", [AllReduce(), AllReduce(codec=int8(block=16)), Gossip()], ids=repr
)
def test_where_nobody_has_anything_alone_nothing_is_sent(strategy: Strategy) -> None:
    def body(each: Training) -> Any:
        each.steps(6, meets=range(1, 6))
        return each.buddies.replicator, each.buddies.collect_news(), each.regroup((0, 1))

    assert trained(3, body, strategy) == [(None, False, "")] * 3


# ---- in whole jobs

KEPT = (
    r"rank {old} was lost: .*; what it alone had is kept by rank {new}, as of step {step} \({ago} "
    r"ago\)"
)
COPIED = """
            buddies = run._survival.recovery._run.buddies
            def copied():
                while buddies.replicator.complete_step < run.steps:
                    time.sleep(0.001)
                return True
"""
RESIDUALS = """
            kept = [state["residual"].double() for state in run._own.sync._coded.states]
            torch.save(torch.cat(kept) if kept else torch.zeros(0), out / f"kept-{run.steps}-{run.size}-{run.rank}")
"""  # noqa: E501
CHANGES = """
            torch.save((run.weight / 16, torch.cat([p.detach().reshape(-1) for p in model.parameters()])), out / f"{run.steps}-{run.rank}")
"""  # noqa: E501


@pytest.mark.slow
def test_what_a_killed_workers_codec_had_kept_is_sent_by_another(job: Jobs) -> None:
    """The sum of all that was kept is the same before and after."""
    dies = (
        "            die(run.rank == 1 and run.steps == 9 and run.size == 3 and copied(), 'dead')"
    )
    options = ("--min-workers", "1", "--sync", "AllReduce(codec=error_feedback(topk(0.1)))")
    found = play(
        job,
        "killed",
        *options,
        workers=3,
        nap=0,
        before=COPIED + RESIDUALS + dies,
        epochs=2,
        more="replicate=1",
    )
    assert re.fullmatch(KEPT.format(old=1, new=1, step=9, ago="0 steps"), found.events[0]), (
        found.events
    )
    out = job.folder / "killed"
    one, two = (
        torch.stack([torch.load(out / f"kept-9-{size}-{rank}") for rank in range(size)]).sum(0)
        for size in (3, 2)
    )
    assert float(one.norm()) > 0
    torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_the_next_round_has_what_a_killed_worker_had_changed(job: Jobs) -> None:
    """Compared with what all workers had written down of themselves."""
    dies = "            die(run.rank == 2 and run.steps == 13 and copied(), 'dead')"
    options = ("--min-workers", "1", "--sync", "LocalSGD(8)")
    found = play(
        job,
        "killed",
        *options,
        workers=3,
        nap=0,
        before=COPIED + CHANGES + dies,
        after=CHANGES.replace("run.steps", "run.steps + .5"),
        epochs=2,
        more="replicate=1",
    )
    assert re.fullmatch(KEPT.format(old=2, new=0, step=13, ago=r"\d steps?"), found.events[0]), (
        found.events
    )
    at = {path.name: torch.load(path) for path in (job.folder / "killed").glob("*-[012]")}
    start, end = at["8-0"][1], at["16-0"][1]
    moved, whole = torch.zeros_like(start), 0.0
    for rank, steps in enumerate((8, 8, 5)):
        part = sum(at[f"{step}-{rank}"][0] for step in range(8, 8 + steps))
        moved += (part / steps) * (at[f"{7 + steps}.5-{rank}"][1] - start)
        whole += part / 8
    torch.testing.assert_close(end, start + moved / whole, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_where_nobody_may_be_lost_it_is_said_that_nothing_is_copied(job: Jobs) -> None:
    ended = job.run("with pl.start(replicate=4) as run: pass", 2).end()
    assert (
        ended.code == 0
        and "replicate=4 has no effect: the loss of a worker ends this run" in ended.err
    ), ended
