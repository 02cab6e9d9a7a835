"""Pins: only the ways that have the pinned mesh and cut are planned."""

from __future__ import annotations

import pytest

from paceline.errors import NotationError, UsageError
from paceline.notation import parse_cuts
from paceline.parallel.pipeline import pipeline
from paceline.planner.answer import Plan, Wishes, make_plan
from paceline.planner.planned_cluster import describe_this_host
from tests.harness.cut_plans import make_cut_profile
from tests.harness.plans import make_hosts, make_profile

PROFILE = make_cut_profile()
HOST = describe_this_host(4, 4)


def make_pinned(mesh: str | None = None, cut: str | None = None, sync: str | None = None) -> Plan:
    return make_plan(PROFILE, HOST, Wishes(mesh=mesh, cut=cut, sync=sync))


def list_ways(plan: Plan) -> set[str]:
    return {each.candidate.describe() for each in plan.priced if each.candidate.cluster.workers > 1}


def test_one_worker_stays_for_comparison() -> None:
    plan = make_pinned(cut="shard(zero=2)")
    assert plan.alone.candidate.cluster.workers == 1
    assert list_ways(plan) == {
        f"{count} workers, shard(zero=2){again}"
        for count in (2, 3, 4)
        for again in ("", ", activation checkpoints")
    }


def test_a_mesh_is_pinned() -> None:
    assert {each.candidate.mesh for each in make_pinned("data=2, tensor=2").priced} == {
        "",
        "data=2, tensor=2",
    }
    # An axis without a number has any.
    meshes = {each.candidate.mesh for each in make_pinned("data, stage=2").priced}
    assert meshes == {"", "stage=2", "data=2, stage=2"}
    for each in make_pinned("data=3").priced:
        assert each.candidate.cluster.workers in (1, 3) and not each.candidate.cut
    assert {each.candidate.zero for each in make_pinned("shard=2").priced} == {0, 1, 2, 3}


def test_a_pipeline_is_pinned_with_numbers_that_are_not_tried_otherwise() -> None:
    cut = 'pipeline("auto", schedule="gpipe", micro_batches=16)'
    chosen = [each.candidate for each in make_pinned("stage=2", cut).priced]
    (way,) = (each for each in chosen if each.stages > 1 and not each.recompute)
    (made,) = parse_cuts(way.cut)
    assert isinstance(made, pipeline)
    assert (made.schedule, made.micro_batches, made.chunks) == ("gpipe", 16, None)
    interleaved = make_pinned("stage=2", 'pipeline(schedule="interleaved", chunks=2)')
    assert all(each.candidate.chunks == 2 for each in interleaved.priced if each.candidate.mesh)
    two_stages = make_pinned("stage=2", 'pipeline(schedule="zbv")')
    assert any("zbv" in each.candidate.cut for each in two_stages.priced)
    assert not any("chunks" in each.candidate.cut for each in two_stages.priced)


def test_gathered_units_are_pinned() -> None:
    by_layer, at_once = (
        next(each for each in make_pinned(cut=cut).priced if each.candidate.zero == 3)
        for cut in ('shard("blocks.*", zero=3)', "shard(zero=3)")
    )
    # The whole model is one unit, which is whole from the begin of a step to its end.
    assert at_once.candidate.units == () and at_once.state_bytes > by_layer.state_bytes
    with pytest.raises(UsageError, match=r"no measured layer has such a name.* blocks\.\*"):
        make_pinned(cut='shard("layers.*", zero=3)')


def test_units_of_a_model_whose_layers_are_not_measured() -> None:
    plain = make_profile()
    whole = make_plan(plain, HOST, Wishes(cut="shard(zero=3)"))
    assert whole.together.candidate.zero == 3
    with pytest.raises(UsageError, match="there are: none"):
        make_plan(plain, HOST, Wishes(cut="shard('blocks.*', zero=3)"))


def test_a_strategy_and_a_mesh_are_pinned_together() -> None:
    plan = make_plan(PROFILE, make_hosts(4), Wishes(sync="LocalSGD(8)", mesh="data=2"))
    assert {each.candidate.cluster.workers for each in plan.priced} == {1, 2}
    assert plan.best.candidate.sync in ("", "LocalSGD(8)")


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"mesh": "stage=5"}, r"has --mesh stage=5; there are: 2 workers; .*; \.\.\.$"),
        ({"mesh": "tensor=4"}, "has --mesh tensor=4"),
        ({"mesh": "shard=2", "cut": 'tensor("auto")'}, r'--mesh shard=2 --cut tensor\("auto"\)'),
        ({"mesh": "rows=2"}, "it has the axis rows"),
        ({"mesh": "data=x"}, "can't be read"),
        ({"cut": "layers()"}, "there are shard, tensor and pipeline"),
        ({"cut": "pipeline(split=[1, 3])"}, "the plan finds the rest"),
        ({"cut": "shard('blocks.*', zero=1)"}, r"--cut 'shard\(zero=1\)' can"),
        ({"cut": "pipeline(schedule='1f1b', chunks=2)"}, "chunks"),
        ({"cut": "shard(zero=1), tensor('auto')"}, "several cuts together"),
        ({"cut": "shard(zero=2)", "sync": "LocalSGD(8)"}, "--sync LocalSGD"),
    ],
)
def test_impossible_pins(wishes: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan(PROFILE, HOST, Wishes(**wishes))  # type: ignore[arg-type]


def test_a_cut_that_cant_be_read() -> None:
    with pytest.raises(NotationError):
        make_pinned(cut="shard(")


def test_turnings_have_the_pins_too() -> None:
    cluster = make_hosts(2, bytes_per_second=1e6)
    pinned = make_plan(PROFILE, cluster, Wishes(cut="shard(zero=1)"))
    assert all(each.best.candidate.zero in (0, 1) for each in pinned.turnings)
    assert any(each.best.candidate.zero == 1 for each in pinned.turnings)
