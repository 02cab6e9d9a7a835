"""A script for Horovod, as it is, on paceline. It goes on when a process dies.

Run it with `paceline run --horovod --workers 2 examples/bridges/horovod_script.py`. With
`--min-workers 1` the others go on when one dies, and with `--restarts 1` another one comes in.
"""

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3

hvd.init()
torch.manual_seed(0)
points = torch.rand(2048, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
sampler = hvd.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)  # 32 in each process
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Train the epochs that are left. Called again after processes have changed."""
    while state.epoch < EPOCHS:
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            sampler.record_batch(number, len(x))
            if number % 8 == 7:
                state.commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
right = hvd.allreduce((model(points).argmax(1) == data.tensors[1]).float().mean(), name="right")
if hvd.rank() == 0:
    print(f"{hvd.size()} processes: accuracy {right:.3f}")
