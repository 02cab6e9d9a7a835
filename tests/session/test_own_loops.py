"""A loop without a prepared loader: steps on servers are those of all workers, also under
--min-workers; a loss ends the run.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness.jobs import Jobs

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, time
torch.manual_seed(0)
table = pl.SparseEmbedding(50, 3)
model = nn.Sequential(table, nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with pl.start() as run:
    model, optimizer = run.prepare(model, optimizer)
    chance = torch.Generator().manual_seed(run.rank)
    for step in range(6):
        ids = torch.randint(0, 50, (4, 2), generator=chance)
        time.sleep(0.2 * ((run.rank + step) % 2))
        model(ids).square().mean().backward()
        if os.environ.get("DIES") and run.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    torch.save([table.lookup(torch.arange(50)), *(p.detach() for p in model[1].parameters())], os.environ["OUT"] + f"-{run.rank}")
"""  # noqa: E501


@pytest.mark.parametrize("sync", ["AllReduce()", "ParameterServer()"])
def test_every_step_has_the_gradients_of_all(job: Jobs, sync: str) -> None:
    """Whoever is slow: the others wait for its gradient."""
    found = {}
    for name, options in (("usual", ()), ("surviving", ("--min-workers", "1"))):
        ended = job.run(SCRIPT, 2, *options, "--sync", sync, OUT=str(job.folder / name)).end()
        assert ended.code == 0, ended
        one, other = found[name] = [torch.load(job.folder / f"{name}-{rank}") for rank in range(2)]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    for mine, theirs in zip(found["usual"][0], found["surviving"][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sync", ["AllReduce()", "ParameterServer()"])
def test_a_loss_ends_the_run_as_no_turn_would_bring_its_gradients_again(
    job: Jobs, sync: str
) -> None:
    ended = job.run(
        SCRIPT, 2, "--min-workers", "1", "--sync", sync, OUT=str(job.folder / "x"), DIES="1"
    ).end()
    assert ended.code != 0 and not list(job.folder.glob("x-*")), ended
    assert "rank 1" in ended.err, ended
