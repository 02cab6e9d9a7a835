"""A recommender whose tables are too large for a worker.

Run it with `paceline run --workers 2 examples/recommender.py`.

Users and items are rows of two tables of ten million rows on servers. A batch fetches the rows that
it uses, and a row that was never used takes no memory. The model is matrix factorisation with a
small network on top.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline as pl

ROWS, WIDTH = 10_000_000, 8


class Ratings(Dataset):
    """Synthetic ratings: (user, item), and 1 if the user likes the item, else 0.

    The indices of a user and an item decide. Few users and items are frequent.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        # The rows are spread over the whole tables.
        user, item = (400 ** torch.rand(2, generator=generator).double()).long() * 24_989
        likes = (user % 7 < 3) == (item % 5 < 2)
        return torch.stack([user, item]), (
            likes ^ (torch.rand((), generator=generator) < 0.05)
        ).float()


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # In place of nn.EmbeddingBag(ROWS, WIDTH), which takes 320 MB.
        self.users = pl.SparseEmbedding(ROWS, WIDTH, std=0.5)
        self.items = pl.SparseEmbedding(ROWS, WIDTH, std=0.5, seed=1)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, :1]), self.items(pairs[:, 1:])  # bags of one row each
        return self.top(torch.cat([user, item, user * item], dim=1))[:, 0]

    def prefetch(self, pairs: Tensor) -> None:
        self.users.prefetch(pairs[:, :1])
        self.items.prefetch(pairs[:, 1:])


torch.manual_seed(0)
model = Recommender()
train = DataLoader(Ratings(0, 12_800), batch_size=256)
held_out = DataLoader(Ratings(1_000_000, 1000), batch_size=500)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

with pl.start() as run:
    model, optimizer, train, held_out = run.prepare(model, optimizer, train, held_out)
    for pairs, liked in train:
        loss = F.binary_cross_entropy_with_logits(model(pairs), liked)
        if (following := train.peek()) is not None:
            model.prefetch(following[0])  # fetch rows of the next batch during this step
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    with torch.no_grad():
        is_right = torch.cat(
            [run.gather((model(pairs) > 0) == (liked > 0.5)) for pairs, liked in held_out]
        )
    run.results["accuracy"] = is_right.float().mean().item()
    run.print(f"accuracy {run.results['accuracy']:.3f} on {len(is_right)} new pairs")
