"""Spans are kept with the step they belong to, as many as asked for."""

from __future__ import annotations

import pytest

from paceline.trace import Span, Trace


def test_a_span_belongs_to_the_step_under_way() -> None:
    trace = Trace()
    trace.record_span("forward", "compute", 10, 20)
    trace.step = 3
    trace.record_span("bucket 0", "exchange", 15, 30)
    assert trace.list_spans() == [
        Span("forward", "compute", 10, 20, 0),
        Span("bucket 0", "exchange", 15, 30, 3),
    ]


def test_the_newest_spans_are_kept() -> None:
    trace = Trace(2)
    for start in range(4):
        trace.record_span("span", "data", start, start + 1)
    assert [span.start for span in trace.list_spans()] == [2, 3]


def test_nothing_or_everything_is_kept() -> None:
    off, everything = Trace(0), Trace(None)
    for trace in (off, everything):
        for start in range(30_000):
            trace.record_span("span", "data", start, start + 1)
    assert off.list_spans() == [] and not off.keeps_spans
    assert len(everything.list_spans()) == 30_000 and everything.keeps_spans


def test_a_block_is_recorded_even_when_it_raises() -> None:
    trace = Trace()
    with pytest.raises(ValueError, match="broken"), trace.measure_span("load", "data"):
        raise ValueError("broken")
    (span,) = trace.list_spans()
    assert (span.name, span.kind) == ("load", "data") and 0 < span.start <= span.end


def test_what_is_exchanged_along_an_axis_names_it_and_is_kept_with_the_rest() -> None:
    trace = Trace()
    tensor = trace.copy_for_axis("tensor")
    trace.step = 2
    tensor.record_span("sum", "tensor", 10, 20)
    trace.record_span("turn", "step", 0, 30)
    assert (
        trace.list_spans()
        == tensor.list_spans()
        == [Span("sum", "tensor", 10, 20, 2, "tensor"), Span("turn", "step", 0, 30, 2)]
    )
    assert tensor.step == 2
