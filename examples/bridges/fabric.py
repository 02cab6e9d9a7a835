"""A loop of Lightning Fabric whose gradients paceline exchanges.

Run it with `python examples/bridges/fabric.py`, or with
`paceline run --workers 2 examples/bridges/fabric.py`: the losses are the same. It learns whether a
point is inside of a circle.
"""

import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.bridges.fabric import PacelineStrategy

torch.manual_seed(0)
points = torch.rand(1100, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
train, validate = (
    TensorDataset(points[:1000], inside[:1000]),
    TensorDataset(points[1000:], inside[1000:]),
)

fabric = Fabric(accelerator="cpu", strategy=PacelineStrategy(sync="AllReduce()"))
fabric.launch()  # opens the run; `paceline run` has started the workers

model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
# A step has 64 samples, of all workers together.
loader = fabric.setup_dataloaders(DataLoader(train, batch_size=64, shuffle=True))
validation = fabric.setup_dataloaders(DataLoader(validate, batch_size=64))

for epoch in range(3):
    for x, y in loader:  # this worker's share of each global batch
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = torch.zeros(())
        for x, y in validation:
            right += fabric.all_reduce((model(x).argmax(1) == y).sum(), reduce_op="sum")
    if fabric.is_global_zero:
        print(f"epoch {epoch}: accuracy {float(right) / len(validate):.2f}")
    # with the position of the loader and the state of each worker, for any number of workers
    fabric.save("circle.ckpt", {"model": model, "optimizer": optimizer, "loader": loader})
