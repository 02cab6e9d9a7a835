"""Has the shares of loaders follow the speeds of workers: what each did in a step goes along when
all hand over their logs.

step ends    units and seconds of my own work (compute, data) are kept
all meet     everybody has those of all workers, and comes to the same decision; where shares
             change, loaders deal by them at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from paceline.cluster.mesh import SAMPLE_AXES, Mesh
from paceline.data.loader import ShareLoader
from paceline.data.spec import LoaderSpec
from paceline.loop.turns import TrainingLoop
from paceline.record.history import RunHistory
from paceline.trace import STEP_PARTS
from paceline.unequal.shares.balancer import Balancer, NewShares
from paceline.unequal.shares.quota import ProcessorQuota
from paceline.unequal.shares.work_record import StepWork

OWN: Final = ("compute", "data")  # parts of a step that are a worker's own work
ALIKE: Final = 1.05  # times as long: workers that take it are as fast as the fastest


class OwnStep(NamedTuple):
    """A step of this worker: units, seconds of own work and of the whole step, turns, all
    samples.
    """

    units: float
    own: float
    whole: float
    turns: int
    samples: int


class ShareFollower:
    """Adjusts loaders with shares="auto" to the speeds of workers.

    `loaders` are all prepared ones. `mesh` has the workers' places if a model is cut. `quota`
    measures how much of a quota this worker has used.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        loaders: list[ShareLoader],
        history: RunHistory,
        *,
        mesh: Mesh | None = None,
        quota: ProcessorQuota | None = None,
    ) -> None:
        self._loop, self._loaders, self._history, self._mesh, self._quota = (
            loop,
            loaders,
            history,
            mesh,
            quota,
        )
        self._steps: list[OwnStep] = []
        self._names: tuple[int, ...] = ()
        self._balancer = Balancer(1)
        self._per_sample = 1.0  # units
        self._said = 0  # disturbed calibrations

    @property
    def _leading_terms(self) -> LoaderSpec | None:
        """How the loader deals whose turns are the steps, if its shares go by speed."""
        leader = self._loop.turns.leader
        return (
            leader.loader.terms
            if leader is not None and leader.loader.terms.speeds is not None
            else None
        )

    def epoch_began(self) -> None:
        """Leave out the work between two epochs: an evaluation is no part of the next step."""
        if self._quota is not None:
            self._quota.skip_use()

    def step_ended(self, step: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Keep what this worker did in a step, where shares go by speed."""
        terms = self._leading_terms
        if terms is not None and not terms.is_alone:
            used = 0.0 if self._quota is None else self._quota.measure_lap()
            if self._loop.idle_epochs.flushing:
                return
            units, turns = self._loop.clock.work
            own = max(sum(seconds[part] for part in OWN), used)
            self._steps.append(
                OwnStep(
                    units, own, max(sum(seconds[part] for part in STEP_PARTS), own), turns, samples
                )
            )

    def drain_steps(self) -> list[OwnStep]:
        """Steps that were kept since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def take_drained(self, drained: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Take in what all workers have drained, by rank, and change shares if it is time.

        Collective, where they change.
        """
        terms = self._leading_terms
        if terms is None or terms.is_alone:
            return
        agreement, speeds = terms.agreement, terms.speeds
        assert speeds is not None
        hosts = agreement.hosts or ("",) * agreement.group.size
        if agreement.origins != self._names:
            self._names = agreement.origins
            self._balancer = Balancer(
                agreement.group.size, speeds.curves_of(agreement.origins, hosts)
            )
            self._per_sample = speeds.per_sample  # which a newcomer knows as well as others
        balancer = self._balancer
        mine = [[OwnStep(*step) for step in steps] for steps in drained]
        balancer.take_steps(self._merge_workers(mine))
        usual = self._per_sample if terms.deals_by_cost else None
        split = balancer.decide_speeds(per_sample=usual)
        self._announce_disturbed()
        if balancer.phase != "equal":
            speeds.record_speeds(agreement.origins, hosts, balancer.curves, usual or 1.0)
        if split is not None:
            self._change_shares(terms, split, hosts)

    def _merge_workers(self, drained: Sequence[Sequence[OwnStep]]) -> list[StepWork]:
        """Steps that all workers took; of workers with the same samples, the slowest counts."""
        count = min(map(len, drained))
        steps = list(zip(*(mine[len(mine) - count :] for mine in drained), strict=True))
        found = [self._summarize_work(ranks) for ranks in steps]
        if samples := sum(ranks[0].samples for ranks in steps):
            self._per_sample = sum(sum(work.units) * work.turns for work in found) / samples
        return found

    def _summarize_work(self, ranks: Sequence[OwnStep]) -> StepWork:
        by_share: dict[int, OwnStep] = {}
        for rank, mine in enumerate(ranks):
            share = rank if self._mesh is None else self._mesh.index_along(rank, SAMPLE_AXES)
            if share not in by_share or by_share[share].own < mine.own:
                by_share[share] = mine
        workers = [mine for _, mine in sorted(by_share.items())]
        turns = max(workers[0].turns, 1)
        units, seconds = (
            tuple(mine.units / turns for mine in workers),
            tuple(mine.own / turns for mine in workers),
        )
        return StepWork(units, seconds, max(mine.whole for mine in workers), turns)

    def _change_shares(self, terms: LoaderSpec, split: NewShares, hosts: Sequence[str]) -> None:
        batch = terms.loader.batch_size or 0
        before = self._usual_shares(terms, batch)
        for loader in self._loaders:
            if loader.terms.speeds is not None:
                loader.reshare(loader.terms.shares_of_present())
        shares = self._usual_shares(terms, batch)
        if shares != before or not batch:
            self._history.announce_event(describe_shares(split, shares, hosts))

    def _usual_shares(self, terms: LoaderSpec, batch: int) -> list[int]:
        """Return the shares of a usual batch; none where there is no usual one."""
        return list(terms.shares(batch)) if batch else []

    def _announce_disturbed(self) -> None:
        """Say, twice at most, that a calibration was of no use."""
        if self._balancer.disturbed > self._said < 2:
            self._said += 1
            then = (
                "it is done again"
                if self._said == 1
                else "shares stay equal until step times are steady"
            )
            self._history.announce_event(
                "step times vary too much to tell how fast workers are (does something else run "
                f"there?): {then}"
            )


def describe_shares(split: NewShares, shares: Sequence[int], hosts: Sequence[str]) -> str:
    """Say in a line what shares of a usual batch are, who is slow, and what that brings."""
    usual = sum(shares) / len(shares) if shares else 1.0
    seconds = [curve(usual) for curve in split.curves]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / min(seconds)
    where = f" on {hosts[slowest]}" if hosts[slowest] else ""
    who = (
        f"rank {slowest}{where} takes {times:.1f} times as long for a sample"
        if times > ALIKE
        else "all take as long for a sample"
    )
    now = f"shares are now {' + '.join(map(str, shares))}" if shares else "shares have changed"
    return f"{now}: {who}; step {split.after * 1e3:.0f} ms, {split.before * 1e3:.0f} before"
