"""After Horovod: `paceline run --workers 2 examples/migrations/horovod_after.py`, or `mpirun -n
2 python ...` as before.
"""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
train, validation = torch.utils.data.random_split(data, [3584, 512])
# of all workers: what 2 processes had together
loader = DataLoader(train, batch_size=64, shuffle=True)
held_out = DataLoader(validation, batch_size=128)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
# what is right for a batch of 64, however many workers there are
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

with pl.start() as run:  # models and optimizers are made equal by prepare
    model, optimizer, loader, held_out = run.prepare(model, optimizer, loader, held_out)
    for epoch in run.epochs(3):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # when it returns, gradients are those of all
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        with torch.no_grad():
            right = torch.cat([run.gather(model(x).argmax(1) == y) for x, y in held_out])
        run.print(f"epoch {epoch}: accuracy {right.float().mean():.3f}")
        run.save()
