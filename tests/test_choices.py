"""Options with a few choices: what builds an object by a name knows the names of its `Literal`,
and other values are refused.
"""

from __future__ import annotations

from typing import Literal, get_args

from paceline.comm.schedule import SCHEDULES, ScheduleName
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.parallel.pipelining.schedules import CHUNKED_SCHEDULES, FIXED_SCHEDULES
from paceline.parallel.pipelining.schedules import ScheduleName as PipelineScheduleName
from paceline.session.start import TRACES, TraceLength
from paceline.sync.gossip.graph import GRAPHS, Graph
from paceline.sync.routes import REDUCER_MAKERS, Via


def test_what_is_built_by_a_name_has_the_names_of_its_literal() -> None:
    assert get_args(ScheduleName) == tuple(SCHEDULES)
    assert get_args(Via) == tuple(REDUCER_MAKERS)
    assert set(get_args(PipelineScheduleName)) == {*FIXED_SCHEDULES, *CHUNKED_SCHEDULES}
    assert get_args(Graph) == tuple(GRAPHS)
    assert get_args(TraceLength) == tuple(TRACES)


def test_what_is_no_choice_is_told_from_one() -> None:
    kind = int | Literal["last", "all"] | None
    assert describe_unknown_choice("trace", "last", kind) == ""
    assert (
        describe_unknown_choice("trace", "lst", kind)
        == "trace='lst' is unknown; possible: all, last; did you mean last?"
    )
    assert (
        describe_unknown_choice("zero", True, Literal[1, 2])
        == "zero=True is unknown; possible: 1, 2"
    )
    assert issubclass(UsageError, ValueError)
