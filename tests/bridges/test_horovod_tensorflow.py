"""TensorFlow by Horovod's calls: training on several workers is that of one with whole batches.

One job for each number of workers does everything (`tests/harness/programs`), as each worker
imports TensorFlow for seconds. The tests look at what it has left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.jobs import PRELOADED, ROOT, jobs

pytestmark = pytest.mark.bridges
PROGRAM = ROOT / "tests" / "harness" / "programs" / "tensorflow_training.py"
PATIENT = 280.0  # seconds: each worker imports TensorFlow, and makes some fifty graphs
LOSS = 1e-5  # how far losses of several workers are from those of one, at most
SIZES = (1, 2, 3)


@pytest.fixture(scope="module", params=SIZES)
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[list[Any]]:
    """What each worker has written, by rank."""
    folder = tmp_path_factory.mktemp(f"workers{request.param}")
    with jobs(folder, PRELOADED) as started:
        ended = started.program(PROGRAM, request.param, args=(str(folder),)).end(PATIENT)
    assert ended.code == 0, ended
    yield [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def assert_near(one: Any, other: Any, bound: float = LOSS) -> None:
    """Compare nested lists of numbers."""
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_near(a, b, bound)
    else:
        assert one == pytest.approx(other, abs=bound)


def test_ranks_and_hosts(results: list[Any]) -> None:
    size = len(results)
    assert [each["place"] for each in results] == [[n, size, n, size, 1] for n in range(size)]


@pytest.mark.parametrize("way", ["fit", "fit, clipped", "tape", "eager tape"])
def test_training_is_that_of_one_process_with_the_whole_batch(results: list[Any], way: str) -> None:
    for each in results:
        (expected, weights), (losses, own) = each[way]
        if isinstance(expected, dict):
            assert expected.keys() == losses.keys()
            expected, losses = ([*series.values()] for series in (expected, losses))
        assert_near(losses, expected)
        assert_near(own, weights, 1e-4)
        assert own == results[0][way][1][1]  # to the bit on all workers


def test_clipping_acts_on_the_mean(results: list[Any]) -> None:
    """What makes the test above one of clipping: it changes the losses."""
    assert (
        abs(results[0]["fit"][0][0]["loss"][-1] - results[0]["fit, clipped"][0][0]["loss"][-1])
        > 0.01
    )


def test_options_of_the_exchange_are_honoured(results: list[Any]) -> None:
    losses = results[0]["tape"][1][0]
    assert_near(results[0]["predivided"][0], losses)
    if len(results) > 1:  # Adam nearly undoes the factor, but for its epsilon
        assert results[0]["summed"][0] != losses
    half = results[0]["half"][0]
    assert half != losses
    assert_near(half, losses, 1e-2)


def test_a_mutant_that_never_communicates_is_found(results: list[Any]) -> None:
    losses, expected = results[0]["mutant"][0], results[0]["tape"][0][0]
    differs = max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 100 * LOSS
    alike = all(each["mutant"][1] == results[0]["mutant"][1] for each in results)
    assert (differs, alike) == ((False, True) if len(results) == 1 else (True, False))


def expect_operations(rank: int, size: int) -> dict[str, Any]:
    """What each operation gives, where each worker has [rank + 1, 2]."""
    first = [float(n + 1) for n in range(size)]
    product = 1.0
    for factor in first:
        product *= factor
    return {
        "average": [sum(first) / size, 2.0],
        "sum": [sum(first), 2.0 * size],
        "min": [1.0, 2.0],
        "max": [float(size), 2.0],
        "product": [product, 2.0**size],
        "scaled": [30 * sum(first), 60.0 * size],
        "half": [sum(first) / size, 2.0],
        "bfloat16": [sum(first), 2.0 * size],
        "int64": [int(sum(first)), 2 * size],
        "group": [[sum(first), 2.0 * size], [2 * sum(first)]],
        "slices": first,
        "gather": [n for n in range(size) for _ in range(n + 1)],
        "broadcast": [float(size), 2.0],
        "alltoall": [rank + 10 * n for n in range(size)],
        "alltoall, uneven": [[n for n in range(size) for _ in range(rank)], [rank] * size],
    }


def test_operations(results: list[Any]) -> None:
    for rank, each in enumerate(results):
        expected = expect_operations(rank, len(results))
        found = {name: each["operations"][name] for name in expected}
        in_graph = {name: each["operations"][f"{name}, in a graph"] for name in expected}
        # what float16 can't hold is gone
        assert found == in_graph
        for name in ("average", "half"):
            assert_near(found.pop(name), expected.pop(name), 1e-3 if name == "half" else 1e-6)
        assert found == expected


def test_float16_loses_what_it_cannot_hold(results: list[Any]) -> None:
    """1/4096 is added to each element, and 2 + 1/4096 is 2 in float16."""
    assert results[0]["operations"]["half"][1] == 2.0


def test_a_reduction_has_a_gradient(results: list[Any]) -> None:
    total = sum(n + 1.0 for n in range(len(results)))  # each worker weighs the sum by its rank + 1
    for each in results:
        assert each["gradient"] == [2 * total, 4 * total]


def test_sparse_gradients_stay_sparse_unless_they_are_made_dense(results: list[Any]) -> None:
    size = len(results)
    odd = size // 2
    expected = [[(size - odd) / size], [odd / size], [1.0], [0.0]]
    for each in results:
        (is_sparse, own), (stays_sparse, dense) = each["sparse"], each["sparse as dense"]
        assert (is_sparse, stays_sparse) == (True, False)
        assert_near([own, dense], [expected, expected])


def test_the_learning_rate_follows_its_schedule(results: list[Any]) -> None:
    assert results[0]["rates"] == [0.5, 1.0, 0.5, 0.5]


def test_workers_that_have_joined_take_part_with_zeros(results: list[Any]) -> None:
    size = len(results)
    for rank, each in enumerate(results):
        steps, last = each["join"]
        assert_near(steps, [[1.0], [1 / size]] if rank == 0 else [[1.0]])
        assert last == 0


def test_a_process_set_reduces_among_its_workers(results: list[Any]) -> None:
    members = {1: [], 2: [1], 3: [0, 2]}[len(results)]
    for rank, each in enumerate(results):
        if rank in members:
            assert each["set"] == [[sum(members) / len(members)], ""]
        elif members:
            mean, refused = each["set"]
            assert mean is None and f"doesn't have this rank, {rank}" in refused


def test_objects_travel(results: list[Any]) -> None:
    for each in results:
        assert each["objects"] == [[{"rank": n} for n in range(len(results))], 0]


def test_a_saved_model_needs_no_paceline(results: list[Any]) -> None:
    assert results[0]["saved"] == "AdamFalse"


def test_mismatches_name_the_ranks_on_all_workers(results: list[Any]) -> None:
    if len(results) == 1:
        pytest.skip("one worker agrees with itself")
    for each in results:
        refused = each["refused"]
        for part in ("shapes", "shapes in a graph"):
            assert "rank 0 has [2], but rank 1 has [3]" in refused[part]
        assert "rank 0 has int32, but rank 1 has int64" in refused["dtypes"]
        assert "rank 0 has 0, but rank 1 has 1" in refused["roots"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("root", "root rank 9 is not one of"),
        ("splits", "alltoall with splits="),
        ("device", "UsageError: device_dense and device_sparse (/gpu:0) can't be honoured"),
        ("op and average", "only one of them"),
        ("slices", "UsageError: tf.IndexedSlices can be summed or averaged"),
        ("scaled slices", "UsageError: prescale_factor and postscale_factor are for dense"),
        ("group of slices", "UsageError: grouped_allreduce takes dense tensors"),
        ("gradient op", "UsageError: gradients are reduced by Average or Sum"),
        ("predivided sum", "UsageError: gradient_predivide_factor divides a mean"),
        ("passes", "UsageError: backward_passes_per_step=2 can't be honoured"),
        ("optimizer", "UsageError: DistributedOptimizer got a builtins.object"),
        ("strategy", "UsageError: this is inside of a MirroredStrategy"),
        ("set", "was not added"),
        ("momentum", "UsageError: momentum_correction=True can't be honoured"),
    ],
)
def test_what_cannot_be_honoured_is_refused(results: list[Any], part: str, message: str) -> None:
    for each in results:
        assert message in each["refused"][part]
