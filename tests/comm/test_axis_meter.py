"""What is exchanged along an axis is measured where a worker stands still for it, and shows
itself while it does.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import FinishedWork, Traffic
from paceline.trace import Trace
from tests.harness.jobs import PATIENCE
from tests.harness.thread_groups import ThreadGroup, spawn


class Slow(FinishedWork):
    """An exchange that ends when it is let go."""

    def __init__(self, result: str) -> None:
        super().__init__(result)
        self.go, self.waited = threading.Event(), threading.Event()

    def done(self) -> bool:
        return self.go.is_set()

    def wait(self, timeout: float | None = None) -> str:
        self.waited.set()
        assert self.go.wait(PATIENCE)
        return str(super().wait(timeout))


def test_an_exchange_shows_itself_while_it_lasts_and_is_measured() -> None:
    trace = Trace()
    meter = AxisMeter("tensor", trace)
    trace.step = 7
    assert (meter.since, meter.seconds) == (None, 0.0)
    before = time.monotonic()
    with meter.measure_exchange("output of up"):
        assert (
            meter.what == "output of up along `tensor` of step 7"
            and before <= (meter.since or 0.0) <= time.monotonic()
        )
    (span,) = trace.list_spans()
    assert (span.name, span.kind, span.axis, span.step) == ("output of up", "tensor", "tensor", 7)
    assert meter.since is None and meter.seconds == pytest.approx((span.end - span.start) / 1e9)


def test_of_an_exchange_on_its_way_the_wait_counts_alone() -> None:
    trace, work, found = Trace(), Slow("sum"), list[str]()
    meter, begun = AxisMeter("shard", trace), time.perf_counter_ns()
    waiting = threading.Thread(
        target=lambda: found.append(meter.wait_measured(work, "the gradients", begun))
    )
    waiting.start()
    assert (
        work.waited.wait(PATIENCE)
        and meter.since is not None
        and meter.what == "the gradients along `shard` of step 0"
    )
    work.go.set()
    waiting.join(PATIENCE)
    still, flight = trace.list_spans()
    assert found == ["sum"] and meter.since is None
    assert (still.kind, still.axis, flight.kind, flight.axis) == (
        "exchange",
        "shard",
        "shard",
        "shard",
    )
    assert flight.start == begun < still.start <= still.end == flight.end
    assert meter.seconds == pytest.approx((still.end - still.start) / 1e9)


def test_one_that_has_come_costs_nothing() -> None:
    trace, work = Trace(), Slow("sum")
    work.go.set()
    meter = AxisMeter("shard", trace)
    assert meter.wait_measured(work, "the gradients", time.perf_counter_ns()) == "sum"
    assert meter.seconds == 0.0 and [span.kind for span in trace.list_spans()] == ["shard"]


def test_a_wait_that_fails_is_over() -> None:
    meter = AxisMeter("tensor")
    with pytest.raises(ValueError, match="broken"), meter.measure_exchange("a sum"):
        raise ValueError("broken")
    assert meter.since is None


def test_bytes_are_those_of_its_groups_each_once() -> None:
    def body(group: ThreadGroup) -> Traffic:
        meter, other = AxisMeter("shard"), group.make_subgroup([0, 1])
        assert other is not None
        for each in (group, other, group):
            meter.add_sender(each)
        group.all_reduce(torch.ones(4), name="a").wait()
        other.all_gather(torch.ones(2 + 0 * group.rank), name="b").wait()
        return meter.traffic

    assert spawn(2, body) == [Traffic(16 + 8, 0)] * 2


def test_a_wait_that_is_given_up_counts_though_the_exchange_goes_on() -> None:
    trace = Trace()
    meter = AxisMeter("shard", trace)
    with meter.measure_wait("the gradients"):
        assert meter.since is not None
    (still,) = trace.list_spans()
    assert (still.kind, still.axis, meter.since, meter.calls) == ("exchange", "shard", None, 0)
    assert meter.seconds == pytest.approx((still.end - still.start) / 1e9)
