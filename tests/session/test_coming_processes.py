"""Parameters that come during forward, from servers that are programs of their own; and what dies while they are on their way."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
import torch

from tests.harness.jobs import Job, Jobs, wait_for
from tests.harness.served_training import script, weights
from tests.harness.surviving_servers import servers

SOAK = pytest.mark.soak
AHEAD = "ParameterServer(servers=2, bucket_mb=0.05, pull='forward')"


@pytest.mark.slow
def test_the_weights_are_bit_for_bit_those_of_parameters_that_come_with_the_step(job: Jobs) -> None:
    """Three workers with uneven shares, which are slow by turns."""
    slow = "time.sleep(0.003 * (rank == run.steps // 7))"
    for name, sync in (("ahead", AHEAD), ("stepwise", AHEAD.replace("forward", "step"))):
        ended = job.run(script(name, sync, after=slow), 3).end()
        assert ended.code == 0, ended
    assert torch.equal(weights(job, "ahead"), weights(job, "stepwise"))
    events = json.loads((job.folder / "runs" / "ahead" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "parameters" for event in events) > 3 * 19
    assert json.loads((job.folder / "runs" / "ahead" / "summary.json").read_text())["sync"] == AHEAD


FORKED = """
if run.steps == 2 and run.is_first:
    child = os.fork()
    if not child:
        try:
            model[0].weight.sum()
            os._exit(1)
        except Exception as error:
            os._exit(0 if "when this process was forked" in str(error) else 2)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_what_is_read_in_a_forked_process_is_refused(job: Jobs) -> None:
    (job.folder / "forked.py").write_text(FORKED)
    ended = job.run(script("forked", AHEAD, after="exec(open('forked.py').read())"), 2).end()
    assert ended.code == 0, ended


class TestEndings:
    """Each while parameters are on their way: workers sleep between the step and the next forward."""

    def started(self, job: Jobs, after: str = "open('trains', 'w'); time.sleep(0.3)") -> Job:
        launched = job.run(script("ends", AHEAD, epochs=100, after=after), 2)
        wait_for(lambda: (job.folder / "trains").exists() or launched.process.poll() is not None, 60)
        assert launched.process.poll() is None, launched.end()
        return launched

    @pytest.mark.slow
    def test_a_server_is_killed(self, job: Jobs) -> None:
        launched = self.started(job)
        servers(launched)[1].kill()
        ended = launched.end()
        assert ended.code == 1 and "was killed by SIGKILL" in ended.err and "what it kept is lost" in ended.err, ended

    @SOAK
    def test_a_server_is_stopped(self, job: Jobs) -> None:
        """Whether parameters or a step are waited for: the deadline is kept."""
        launched = self.started(job, after="run._context.deadline = 5; open('trains', 'w'); time.sleep(0.3)")
        process = servers(launched)[0]
        process.suspend()
        ended = launched.end()
        assert ended.code == 1 and "DeadlineExceeded" in ended.err and "server 0" in ended.err, ended
        wait_for(lambda: not psutil.pid_exists(process.pid))

    @SOAK
    def test_a_worker_is_killed(self, job: Jobs) -> None:
        launched = self.started(job)
        launched.worker(1).kill()
        ended = launched.end()
        assert ended.code == 137 and "rank 1" in ended.last, ended

    @SOAK
    def test_a_worker_raises(self, job: Jobs) -> None:
        ended = job.run(script("ends", AHEAD, epochs=100, after="1 / 0 if rank and run.steps else None"), 2).end()
        assert ended.code == 1 and "ZeroDivisionError" in ended.err and ended.last.startswith("paceline: rank 1"), ended

    @SOAK
    def test_ctrl_c(self, job: Jobs) -> None:
        launched = self.started(job)
        launched.process.send_signal(signal.SIGINT)
        ended = launched.end()
        assert ended.code == 130 and "Traceback" not in ended.err.split("KeyboardInterrupt")[-1], ended


@SOAK
def test_where_losses_are_survived_it_is_refused(job: Jobs) -> None:
    ended = job.run(script("ends", AHEAD), 2, "--min-workers", "1").end()
    assert ended.code == 1 and "pull='forward' is for runs that end when something is lost" in ended.err, ended
