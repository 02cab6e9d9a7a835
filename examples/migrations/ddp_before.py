"""Before: DistributedDataParallel.

`torchrun --nproc-per-node 2 examples/migrations/ddp_before.py`; ddp_after.py is ours.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
train, validation = torch.utils.data.random_split(data, [3584, 512])
sampler = DistributedSampler(train, seed=0)
loader = DataLoader(train, batch_size=64 // size, sampler=sampler)  # of this process
held_out = DataLoader(
    validation, batch_size=128, sampler=DistributedSampler(validation, shuffle=False)
)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    with torch.no_grad():
        right = sum(((model(x).argmax(1) == y).sum() for x, y in held_out), torch.tensor(0))
    # where the set doesn't divide by the processes, the sampler has padded it, and some count twice
    dist.all_reduce(right)
    if rank == 0:
        print(
            f"epoch {epoch}: loss {mean.item() / size:.3f}, accuracy "
            f"{right.item() / len(validation):.3f}"
        )
        torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
