"""A run ends once, and gives back what it has taken."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.session.run import Run
from tests.harness.runs import workers


def test_what_was_registered_is_called_once_however_a_run_ends() -> None:
    for end in ("close", "fail", "depart"):
        ended: list[str] = []

        def body(run: Run, end: str = end, ended: list[str] = ended) -> None:
            run._ending.on_close(lambda: ended.append(end))
            if end == "depart":
                with pytest.raises(SystemExit):
                    run._ending.leave_job(lambda: ended.append("prepared"))
            elif end == "fail":
                run._ending.end_after_error(ValueError, ValueError("over"))
            else:
                run.close()
            run.close()
            run._ending.end_after_error(ValueError, None)

        workers(1, body)
        assert ended == ["prepared"] * (end == "depart") + [end]


def test_an_error_while_closing_ends_the_run_without_the_others() -> None:
    def body(run: Run) -> Any:
        ended: list[str] = []
        run._ending.on_close(lambda: ended.append("freed"))
        run._saving.raise_write_error = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(ZeroDivisionError):
            run.close()
        run.close()
        return ended

    assert workers(1, body) == [["freed"]]


def test_a_forked_process_ends_nothing() -> None:
    """It leaves the `with` block, too, when it exits there."""

    def body(run: Run) -> None:
        ended: list[str] = []
        run._ending.on_close(lambda: ended.append("ended"))
        if (child := os.fork()) == 0:
            run.close()
            run._ending.end_after_error(ValueError, ValueError("over"))
            os._exit(len(ended) + run._ending.closed)
        assert os.waitpid(child, 0)[1] == 0
        run.close()
        assert ended == ["ended"]

    workers(1, body)
