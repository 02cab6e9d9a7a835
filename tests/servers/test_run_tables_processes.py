"""Sparse tables on servers that are programs of their own, on one host and two; and when one of
them dies.
"""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from tests.harness.jobs import Job, Jobs, free_port, wait_for

TRAIN = """
torch.manual_seed(1)
ids = torch.randint(1000, (160, 3))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.top = pl.SparseEmbedding(1000, 4, "sum", servers={servers}, dtype=torch.float64), nn.Linear(4, 2).double()
    def forward(self, x):
        return self.top(self.table(x).tanh())
model = Model()
optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
with pl.start(name="{name}", folder="runs") as run:
    loader = DataLoader(TensorDataset(ids, ids[:, :2].double().sin()), 8)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in run.epochs({epochs}):
        for a, b in loader:
            loss = ((model(a) - b) ** 2).mean()
            following = loader.peek()
            if following is not None:
                model.table.prefetch(following[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep({nap})
            open("trains", "w").close()
    if run.is_first:
        torch.save(model.table.lookup(torch.arange(1000)), "{name}.pt")
    run.barrier()
"""  # noqa: E501


def script(name: str, **parts: Any) -> str:
    return TRAIN.format(**({"name": name, "servers": 2, "epochs": 2, "nap": 0} | parts))


def resuming(name: str, *, dies: bool, **parts: Any) -> str:
    """A script that saves after its first epoch, with copies of servers, and goes on from there."""
    text = script(name, **parts).replace("dtype=torch.float64)", "dtype=torch.float64, replicas=2)")
    later = f"""
    resumed = run.resume()
    for epoch in run.epochs({parts["epochs"]}):
        if {dies} and epoch == 1:
            run.save()
            raise SystemExit(3)
        run.is_first and open("said", "w").write("resumed" if resumed else "begun")
"""
    return text.replace(f"\n    for epoch in run.epochs({parts['epochs']}):\n", later)


def servers(job: Job) -> list[psutil.Process]:
    return [
        process
        for process in job.processes()
        if "paceline.servers.process.main" in process.cmdline()
    ]


@pytest.mark.slow
def test_on_two_hosts(job: Jobs) -> None:
    """Each has a server, and reaches the other's by TCP."""
    ended = job.run(script("alone"), 1).end()
    assert ended.code == 0, ended
    environ = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    point = f"127.0.0.1:{free_port()}"
    launched = [
        job.run(script("both", servers=None), 1, "--hosts", "2", "--join", point, **environ)
        for _ in range(2)
    ]
    for each in launched:
        ended = each.end()
        assert ended.code == 0, ended
    one, both = (torch.load(job.folder / f"{name}.pt") for name in ("alone", "both"))
    assert float((one - both).norm() / one.norm()) < 1e-9


@pytest.mark.soak
def test_a_server_is_killed(job: Jobs) -> None:
    launched = job.run(script("ends", epochs=1000, nap=0.05), 2)
    wait_for(lambda: (job.folder / "trains").exists() or launched.process.poll() is not None, 60)
    assert launched.process.poll() is None, launched.end()
    assert len(servers(launched)) == 2
    servers(launched)[0].kill()
    ended = launched.end()
    assert (
        ended.code == 1
        and "was killed by SIGKILL" in ended.err
        and "what it kept is lost" in ended.err
    ), ended


@pytest.mark.soak
def test_between_hosts_a_secret_is_needed(job: Jobs) -> None:
    """Of tables, too, that lie beside layers on no servers; the error says for whom."""
    for ended in job.without_secret(script("ends")):
        assert (
            ended.code == 1
            and "SparseEmbedding listens on 2 hosts, and this job has no secret" in ended.err
        ), ended


@pytest.mark.soak
def test_a_run_that_survives_saves_and_resumes(job: Jobs) -> None:
    """With copies; on another number of servers, and by a worker that comes back and resumes by
    itself, in vain.
    """
    wanted = job.run(script("alone", epochs=3), 1).end()
    assert wanted.code == 0, wanted
    ended = job.run(resuming("kept", epochs=3, dies=True, servers=1), 2, "--min-workers", "2").end()
    assert ended.code != 0, ended
    launched = job.run(
        resuming("kept", epochs=3, dies=False, servers=2, nap="0 if len(run.events) > 1 else 1"),
        2,
        "--min-workers",
        "1",
        "--restarts",
        "1",
    )
    wait_for(
        lambda: (
            launched.process.poll() is not None or (job.folder / "said").read_text() == "resumed"
        ),
        120,
    )
    (job.folder / "trains").unlink()
    # one has taken a step with the other
    wait_for(lambda: launched.process.poll() is not None or (job.folder / "trains").exists(), 60)
    assert launched.process.poll() is None, launched.end()
    launched.worker(1).kill()
    ended = launched.end()
    assert ended.code == 0 and "has come" in ended.err, ended
    one, both = (torch.load(job.folder / f"{name}.pt") for name in ("alone", "kept"))
    assert float((one - both).norm() / one.norm()) < 1e-9
