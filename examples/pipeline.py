"""A model whose layers lie on several workers: `paceline run --workers 2 examples/pipeline.py`.

Each worker has some of the layers. A batch goes through them as several micro-batches, so that all
workers are busy at once. With `--mesh 'data=2, stage=2'`, four workers have two replicas of two
stages each. Loss and weights are the same as with one worker.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

WIDTH, BLOCKS = 64, 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def spirals(count: int) -> TensorDataset:
    """Make a data set of points on three spirals, with the index of the spiral."""
    spiral, radius = torch.randint(3, (count,)), torch.rand(count)
    angle = 2 * torch.pi * (spiral / 3 + radius) + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), spiral)


torch.manual_seed(0)
loader = DataLoader(spirals(4096), batch_size=64, shuffle=True)

# All workers are stages, unless --mesh gives another mesh.
with pl.start(mesh="stage", seed=0) as run:
    # No worker has the whole model. Each makes its own part, with the same values on any mesh.
    with pl.meta():
        model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cut = pl.pipeline("embed, blocks.*, head", schedule="1f1b", micro_batches=4)
    model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
    for _ in run.epochs(2):
        for x, y in loader:
            # Forward and backward, through all stages.
            loss = run.step(model, x, y, loss=F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
