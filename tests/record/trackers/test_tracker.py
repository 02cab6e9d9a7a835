"""What trackers are told: the numbers of a line, how late workers were, and what of a summary."""

from __future__ import annotations

from pathlib import Path

from paceline.record.trackers.tracker import TrackedStep, TrackedSummary
from paceline.unequal.stragglers.lateness import RankLateness

LINE = {
    "step": 3,
    "time": 1.5,
    "loss": 2.0,
    "val/x": 1.0,
    "samples": 8,
    "seconds": {"compute": 0.3, "exchange": 0.1, "wait": 0.0, "data": 0.1},
}


def test_a_step_has_the_numbers_of_its_line() -> None:
    late = [RankLateness(0, {"compute": 0.1}), RankLateness(2, {"compute": 0.2, "reading": 0.1})]
    step = TrackedStep.from_line(LINE, late)
    assert (step.step, step.time, step.samples, step.values) == (
        3,
        1.5,
        8,
        {"loss": 2.0, "val/x": 1.0},
    )
    assert step.to_scalars() == {
        **{"loss": 2.0, "val/x": 1.0},
        **{
            "paceline/seconds/compute": 0.3,
            "paceline/seconds/exchange": 0.1,
            "paceline/seconds/wait": 0.0,
            "paceline/seconds/data": 0.1,
        },
        **{
            "paceline/samples_per_second": 16.0,
            "paceline/late/seconds": 0.2 + 0.1,
            "paceline/late/worker": 2.0,
        },
    }


def test_what_was_logged_later_has_nothing_else() -> None:
    assert TrackedStep.from_line({"step": 3, "time": 2.0, "val/x": 1.0}, ()).to_scalars() == {
        "val/x": 1.0
    }


def test_a_summary_has_settings_and_results() -> None:
    fields = {
        **{
            "sync": "AllReduce()",
            "workers": 2,
            "hosts": 1,
            "mesh": {"data": 1, "tensor": 2},
            "loader": {"num_workers": 0, "shares": [4, 4]},
        },
        "settings": {
            **{
                "script": "train.py",
                "arguments": ["--lr", "1"],
                "device": "cpu",
                "batch": 8,
                "shares": "auto",
            },
            **{
                "optimizers": [
                    {"name": "Adam", "lr": 0.1, "betas": [0.9, 0.99]},
                    {"name": "SGD", "lr": 1.0},
                ]
            },
        },
        **{
            "steps": 3,
            "final_loss": None,
            "step_seconds": {"compute": 0.5},
            "logged": {"val/x": 1.0},
            "results": {"a": 1, "b": "text"},
        },
        **{"events": [{"time": 0.0, "what": "x"}], "rank_late": [{"compute": 1.0}]},
    }
    end = TrackedSummary.from_fields(fields, Path("summary.json"), {"seed": 7, "sync": "old"})
    assert end.settings == {
        **{
            "seed": 7,
            "sync": "AllReduce()",
            "workers": 2,
            "hosts": 1,
            "mesh": "data=1, tensor=2",
            "loader_workers": 0,
            "shares": "4, 4",
        },
        **{"script": "train.py", "arguments": "--lr, 1", "device": "cpu", "batch": 8},
        **{"optimizers/0/name": "Adam", "optimizers/0/lr": 0.1, "optimizers/0/betas": "0.9, 0.99"},
        **{"optimizers/1/name": "SGD", "optimizers/1/lr": 1.0},
    }
    assert end.results == {
        "steps": 3.0,
        "step_seconds/compute": 0.5,
        "logged/val/x": 1.0,
        "results/a": 1.0,
    }
    assert end.summary == Path("summary.json")
