"""Fine-tuning with LoRA: `paceline run --workers 2 examples/lora.py`.

The base model is frozen. Only gradients of adapters of rank 4 are exchanged.

A classifier knows the digits of a display. Now they appear in a mirror. Beside each layer an
adapter learns the difference (Hu et al. 2021): W x + B A x, where B begins with zeros.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

RANK = 4
DIGITS = [
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
]
MIRRORED = [0, 2, 1, 3, 5, 4, 6]  # where a mirror shows each of the seven segments


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def displays(count: int, *, mirrored: bool) -> TensorDataset:
    """Make a data set of noisy digits of a display, with their values."""
    which = torch.randint(10, (count,))
    segments = torch.tensor([[float(segment) for segment in digit] for digit in DIGITS])[which]
    return TensorDataset(
        (segments[:, MIRRORED] if mirrored else segments) + 0.15 * torch.randn(count, 7), which
    )


torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(7, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
)
base_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, y = displays(2048, mirrored=False).tensors
# In place of a model that you would load. It is the same on all workers without an exchange.
for _ in range(60):
    F.cross_entropy(model(x), y).backward()
    base_optimizer.step()
    base_optimizer.zero_grad()
for name in ("0", "2", "4"):
    model.register_module(name, Adapted(model.get_submodule(name)))

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
train = DataLoader(displays(2048, mirrored=True), batch_size=64, shuffle=True)
validation = DataLoader(displays(500, mirrored=True), batch_size=100)


@torch.no_grad()
def accuracy() -> float:
    is_right = [run.gather(model(x).argmax(1) == y) for x, y in validation]
    return torch.cat(is_right).float().mean().item()


with pl.start() as run:
    model, optimizer, train, validation = run.prepare(model, optimizer, train, validation)
    run.results["before"] = accuracy()
    for _ in run.epochs(2):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
    run.results["after"] = accuracy()
    run.print(
        f"mirrored digits: {run.results['before']:.2f} before, {run.results['after']:.2f} after;",
        end=" ",
    )
    run.print(
        f"{sum(map(torch.numel, trained))} of {sum(map(torch.numel, model.parameters()))} "
        "parameters were trained"
    )
    if run.is_first:  # save the adapters alone
        torch.save(
            {name: value for name, value in model.state_dict().items() if "lora" in name},
            run.folder.path / "adapters.pt",
        )
