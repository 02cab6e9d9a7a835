"""A GPT of letters from scratch: `paceline run --workers 2 examples/gpt.py`.

It learns from the source of a Python module, then writes text.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline as pl

CONTEXT, WIDTH, HEADS, LAYERS = 32, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x) + self.positions.weight[: x.shape[1]]))


class Windows(Dataset):
    """All pieces of CONTEXT letters of a text, each with the letters that follow."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.text[index : index + CONTEXT], self.text[index + 1 : index + CONTEXT + 1]


text = Path(argparse.__file__).read_text()  # replace it by your own text
letters = sorted(set(text))
encoded = torch.tensor([letters.index(letter) for letter in text[:20_000]])
torch.manual_seed(0)
model = GPT(len(letters))
loader = DataLoader(Windows(encoded), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with pl.start(total_steps=100) as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        run.clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
        if run.steps + 1 == 100:  # this is step 100
            break
    with torch.no_grad():
        generated = encoded[:8].tolist()
        for _ in range(60):
            generated.append(
                model(torch.tensor([generated[-CONTEXT:]], device=run.device))[0, -1]
                .argmax()
                .item()
            )
    run.print("".join(letters[index] for index in generated))
