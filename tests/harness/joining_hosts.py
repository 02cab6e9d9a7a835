"""Hosts that come to a run and leave it, each a launcher of two workers."""

from __future__ import annotations

import json

import psutil

from tests.harness import short_timings
from tests.harness.jobs import Job, Jobs, free_port, listening, wait_for
from tests.harness.survivors import Outcome, outcome, script

EPOCHS = 3
SLOWLY = "0 if (out / 'go').exists() else 1.3"


class Hosts:
    """Launchers of two workers each that are given the same line, with these options, all on this
    machine.

    `silence`: seconds after which the others do without one that says nothing.
    """

    silence = short_timings.MEETING["membership"]["silence"]

    def __init__(self, job: Jobs, *options: str) -> None:
        self.out = job.folder / "killed"
        self.out.mkdir()
        self._job, self._point, self._options = (
            job,
            f"127.0.0.1:{free_port()}",
            ("--min-workers", "1", *options),
        )

    def come(self, hosts: int = 1, **parts: object) -> Job:
        """One more host."""
        membership = short_timings.MEETING["membership"] | {"silence": self.silence}
        environ = {
            "OUT": str(self.out),
            "PACELINE_SECRET": "5a" * 32,
            "PACELINE_INTERFACE": "lo",
            **short_timings.environ(**short_timings.MEETING | {"membership": membership}),
        }
        text = script(
            **(
                {"start": "name='run', folder='killed/runs'", "nap": SLOWLY, "epochs": EPOCHS}
                | parts
            )
        )
        return self._job.run(
            text, 2, *self._options, "--hosts", str(hosts), "--join", self._point, **environ
        )

    def until_met(self) -> None:
        """Wait until a launcher listens where newcomers look for the job."""
        wait_for(lambda: int(self._point.rpartition(":")[2]) in listening())

    def events(self) -> int:
        """How often the workers became others."""
        return max(
            (
                json.loads(line)[1][0]
                for path in self.out.glob("seen-*")
                for line in path.read_text().splitlines()
            ),
            default=0,
        )

    def ended(self, *launched: Job) -> Outcome:
        """What came of it; all these have to end well."""
        (self.out / "go").touch()  # until then a step takes most of a second
        ends = [each.end() for each in launched]
        assert not any(end.code for end in ends), ends
        return outcome(self.out, self.out)


def kill(launched: Job) -> None:
    """A whole host, at once."""
    for process in [psutil.Process(launched.process.pid), *launched.workers()]:
        process.kill()
    launched.process.wait()
