"""Before: Accelerate.

`accelerate launch --cpu --num_processes 2 examples/migrations/accelerate_before.py`;
accelerate_after.py is ours.
"""

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
points = torch.rand(4096, 2) * 2 - 1
data = TensorDataset(points, (points.norm(dim=1) < 0.8).long())
train, validation = torch.utils.data.random_split(data, [3584, 512])
# of a process, half of a step
loader = DataLoader(train, batch_size=32 // accelerator.num_processes, shuffle=True)
held_out = DataLoader(validation, batch_size=128)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = torch.cat(
            [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in held_out]
        )
    accelerator.print(f"epoch {epoch}: accuracy {right.float().mean():.3f}")
    accelerator.save_state("checkpoint")
accelerator.end_training()
