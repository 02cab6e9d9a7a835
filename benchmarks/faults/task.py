"""What all programs train, and what every worker notes down of its turns.

Each process has a file of its own, OUT/turns-PID, with two lines for a turn: one before its
gradients are computed, one after its optimizer's step. A process that is killed leaves a turn
without its second line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

Batch = tuple[Tensor, Tensor, Tensor]  # ids, x, y
SEED = 0
RATE, MOMENTUM = 0.05, 0.9


class Numbered(Dataset[Batch]):
    """Made-up samples that know their number: an epoch of so many global batches, each sample
    once.
    """

    def __init__(self, samples: int) -> None:
        self.tokens = torch.randint(
            0, VOCAB, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(SEED + 1)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        row = self.tokens[index]
        return torch.tensor(index), row[:-1], row[1:]


def options(description: str | None) -> argparse.ArgumentParser:
    """What every program takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument(
        "--share",
        type=int,
        required=True,
        help="samples of a step for each worker, when all are there",
    )
    parser.add_argument("--steps", type=int, required=True, help="of the epoch")
    parser.add_argument("--out", type=Path, required=True, help="folder for what workers write")
    return parser


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Decoder(*MODELS[name])
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy over samples and tokens."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Journal:
    """What this process notes down; each line is in the kernel's hands when a call returns, so
    that SIGKILL takes nothing back.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file = (out / f"turns-{os.getpid()}").open("ab", buffering=0)

    def began(self, rank: int, step: int, ids: Sequence[int], attempt: int | None = None) -> None:
        """This worker is about to compute the gradients of `ids` for a step.

        A later attempt at the same step has a higher number.
        """
        self._write(
            {
                "rank": rank,
                "step": step,
                "ids": list(ids),
                "attempt": attempt,
                "at": time.monotonic(),
            }
        )

    def ended(self, attempt: int, size: int, *, taken: bool = True, counted: bool = True) -> None:
        """The turn is over: whether its step was taken here, whether this worker's gradients
        were in the mean of `size` workers.
        """
        self._write(
            {
                "attempt": attempt,
                "size": size,
                "taken": taken,
                "counted": counted,
                "at": time.monotonic(),
            }
        )

    def finish(self, model: nn.Module) -> None:
        """Leave the final weights behind."""
        hidden = self._out / f"weights-{os.getpid()}.new"
        torch.save(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), hidden)
        hidden.rename(hidden.with_suffix(".pt"))

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
