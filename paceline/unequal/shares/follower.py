"""Adjusts the shares of loaders to the speeds of workers, at each flush of the log.

step ends    each worker records its units and the seconds of its own work (compute, data)
flush        each worker gets the records of all workers, and comes to the same decision; if shares
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
# Workers that take up to this many times as long as the fastest count as equally fast.
ALIKE: Final = 1.05


class OwnStep(NamedTuple):
    """Work of this worker in one step."""

    units: float
    own: float  # seconds of own work
    whole: float  # seconds of the step, with exchange and waiting
    turns: int
    samples: int  # of all workers


class ShareFollower:
    """Adjusts loaders with shares="auto" to the speeds of workers.

    All methods that are collective take the same input on all workers, so decisions agree without
    another message.

    Args:
        loop: Training loop whose steps are measured.
        loaders: All loaders of the run.
        history: History that lines about new shares go to.
        mesh: Places of workers, if the model is cut between them.
        quota: Measures the quota that this worker uses; None without one.
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
        self._said = 0  # disturbed calibrations that were announced

    @property
    def _leading_terms(self) -> LoaderSpec | None:
        """Terms of the loader whose turns are the steps, if its shares go by speed; else None."""
        leader = self._loop.turns.leader
        return (
            leader.loader.terms
            if leader is not None and leader.loader.terms.speeds is not None
            else None
        )

    def epoch_began(self) -> None:
        """Leave out the work between two epochs: an evaluation isn't part of the next step."""
        if self._quota is not None:
            self._quota.skip_use()

    def step_ended(self, step: int, samples: int, seconds: Mapping[str, float]) -> None:
        """Record the work of this worker in a step, if shares go by speed."""
        terms = self._leading_terms
        if terms is not None and not terms.is_alone:
            # The lap is measured even if the step is skipped, so that the next one starts afresh.
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
        """Hand over the steps that were recorded since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def take_drained(self, drained: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Take in the drained steps of all workers, by rank, and change shares if it is time.

        Collective if they change.
        """
        terms = self._leading_terms
        if terms is None or terms.is_alone:
            return
        agreement, speeds = terms.agreement, terms.speeds
        assert speeds is not None
        hosts = agreement.hosts or ("",) * agreement.group.size

        # Other workers: begin anew, with the curves that are known of them.
        if agreement.origins != self._names:
            self._names = agreement.origins
            self._balancer = Balancer(
                agreement.group.size, speeds.curves_of(agreement.origins, hosts)
            )
            # Not the value of before: a worker that has just joined doesn't have that.
            self._per_sample = speeds.per_sample

        balancer = self._balancer
        own_steps = [[OwnStep(*step) for step in steps] for steps in drained]
        balancer.take_steps(self._merge_workers(own_steps))
        per_sample = self._per_sample if terms.deals_by_cost else None
        split = balancer.decide_speeds(per_sample=per_sample)
        self._announce_disturbed()

        # Record speeds even if shares stay, so that they are known when the workers change.
        if balancer.phase != "equal":
            speeds.record_speeds(agreement.origins, hosts, balancer.curves, per_sample or 1.0)
        if split is not None:
            self._change_shares(terms, split, hosts)

    def _merge_workers(self, drained: Sequence[Sequence[OwnStep]]) -> list[StepWork]:
        """Merge the steps that all workers took; also measure the units of a sample."""
        # A worker that joined late has fewer steps: only the last ones are common to all.
        count = min(map(len, drained))
        steps = list(zip(*(taken[len(taken) - count :] for taken in drained), strict=True))
        merged = [self._summarize_work(ranks) for ranks in steps]
        if samples := sum(ranks[0].samples for ranks in steps):
            self._per_sample = sum(sum(work.units) * work.turns for work in merged) / samples
        return merged

    def _summarize_work(self, ranks: Sequence[OwnStep]) -> StepWork:
        """Merge the work of all ranks in a step, one entry for each share of the samples."""
        # Workers with the same samples wait for the slowest of them, so that one counts.
        by_share: dict[int, OwnStep] = {}
        for rank, step in enumerate(ranks):
            share = rank if self._mesh is None else self._mesh.index_along(rank, SAMPLE_AXES)
            if share not in by_share or by_share[share].own < step.own:
                by_share[share] = step
        workers = [step for _, step in sorted(by_share.items())]
        turns = max(workers[0].turns, 1)
        units = tuple(step.units / turns for step in workers)
        seconds = tuple(step.own / turns for step in workers)
        return StepWork(units, seconds, max(step.whole for step in workers), turns)

    def _change_shares(self, terms: LoaderSpec, split: NewShares, hosts: Sequence[str]) -> None:
        """Deal by the recorded speeds from now on, and announce the new shares."""
        batch = terms.loader.batch_size or 0
        before = self._usual_shares(terms, batch)
        for loader in self._loaders:
            if loader.terms.speeds is not None:
                loader.reshare(loader.terms.shares_of_present())
        shares = self._usual_shares(terms, batch)
        if shares != before or not batch:
            self._history.announce_event(describe_shares(split, shares, hosts))

    def _usual_shares(self, terms: LoaderSpec, batch: int) -> list[int]:
        """Shares of a batch of the usual size; empty if batches have no usual size."""
        return list(terms.shares(batch)) if batch else []

    def _announce_disturbed(self) -> None:
        """Announce that a calibration was disturbed, at most twice in a run."""
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
    """Describe the new shares, the slowest worker and the new step time, in one line."""
    # Workers are compared by the time that each would take for an equal share.
    equal_share = sum(shares) / len(shares) if shares else 1.0
    seconds = [curve(equal_share) for curve in split.curves]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / min(seconds)
    where = f" on {hosts[slowest]}" if hosts[slowest] else ""
    who = (
        f"rank {slowest}{where} takes {times:.1f} times as long for a sample"
        if times > ALIKE
        else "all workers take equally long for a sample"
    )
    now = f"shares are now {' + '.join(map(str, shares))}" if shares else "shares have changed"
    return f"{now}: {who}; step {split.after * 1e3:.0f} ms, {split.before * 1e3:.0f} before"
