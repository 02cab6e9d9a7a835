"""torch.compile around models on the backend, which C++ calls in the middle of compiled code."""

from __future__ import annotations

import json

from tests.harness.compiling import COMPILES
from tests.harness.jobs import Jobs

COMPILED = """
import json
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(backend):
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))  # whose buffers are broadcast
    network = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(3):
        network(torch.randn(6, 8, generator=draws)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return [value for x in model.state_dict().values() for value in x.double().flatten().tolist()]

if __name__ == "__main__":
    import paceline.backend
    sys.stdout.write(f"{rank}: {json.dumps([train(backend) for backend in ('gloo', 'paceline')])}\\n")
"""  # noqa: E501


@COMPILES
def test_a_compiled_ddp_trains_as_on_gloo(job: Jobs) -> None:
    ended = job.run(COMPILED).end()
    assert ended.code == 0, ended.err
    lines = dict(line.split("] ", 1)[1].split(": ", 1) for line in ended.out.splitlines())
    (theirs, ours), (theirs_too, ours_too) = json.loads(lines["0"]), json.loads(lines["1"])
    assert ours == theirs and ours_too == theirs_too
    assert ours != ours_too  # each normalises its own batches
