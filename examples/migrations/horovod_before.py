"""Before: Horovod.

`horovodrun -np 2 python examples/migrations/horovod_before.py`; horovod_after.py is the same with
paceline.
"""

import horovod.torch as hvd
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
train, validation = torch.utils.data.random_split(data, [3584, 512])
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=32, sampler=sampler)  # of this process
held_out = DataLoader(
    validation,
    batch_size=128,
    sampler=DistributedSampler(validation, hvd.size(), hvd.rank(), shuffle=False),
)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = torch.cat([hvd.allgather((model(x).argmax(1) == y).float()) for x, y in held_out])
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {right.mean():.3f}")
        torch.save(model.state_dict(), "model.pt")
