"""Measures training steps with and without the exchange of gradients, in the same loop.

It is the script of `paceline bench training`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.errors import UsageError
from paceline.formatting import format_choices

VOCAB, CONTEXT = 256, 64
WARM_UP_STEPS = 5  # first steps, which aren't measured


class Decoder(nn.Module):
    """A transformer decoder of torch's own layers.

    It maps tokens (batch, tokens) to logits (batch, tokens, VOCAB). A token sees itself and earlier
    ones.
    """

    def __init__(self, d: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, d)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, d))
        layer = nn.TransformerEncoderLayer(
            d, heads, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, VOCAB, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(
            self.layers(self.tokens(x) + self.positions, mask=self.mask, is_causal=True)
        )
        return logits


# Width, layers and heads: 0.9 M and 19 M parameters.
MODELS = {"small": (128, 4, 4), "medium": (512, 6, 8)}


def make_stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], float]:
    """Make a function that trains one step, and returns the seconds that it took."""

    def step(x: Tensor, y: Tensor) -> float:
        start = time.perf_counter()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)  # work on a GPU is only queued until then
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", help="small or medium")
    parser.add_argument("--batch", type=int, default=12, help="samples of a step, for each worker")
    parser.add_argument("--steps", type=int, default=60, help="number of steps to measure")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    options = parser.parse_args()
    if options.model not in MODELS:
        raise UsageError(f"--model {options.model}: {format_choices(options.model, MODELS)}")
    if options.batch < 1 or options.steps < 2:
        raise UsageError(
            f"--batch {options.batch}, --steps {options.steps}: give a batch of 1 or more, and 2 "
            "steps or more"
        )

    torch.manual_seed(0)  # the same model on every worker
    with pl.start(folder=options.folder, trace="off") as run:
        batch = options.batch * run.size
        tokens = torch.randint(
            0,
            VOCAB,
            ((options.steps + WARM_UP_STEPS) * batch, CONTEXT + 1),
            generator=torch.Generator().manual_seed(0),
        )
        loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=batch)
        model = Decoder(*MODELS[options.model])
        # The same model without an exchange. Both take turns on the same batches.
        local_model = copy.deepcopy(model).to(run.device)
        step_alone = make_stepper(local_model, torch.optim.AdamW(local_model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        step_exchanged = make_stepper(model, optimizer)
        seconds = [
            (step_exchanged(x, y), step_alone(x, y))
            for x, y in ((x.to(run.device), y.to(run.device)) for x, y in loader)
        ][WARM_UP_STEPS:]
        run.print(
            format_measurements(
                options.model, [pair[0] for pair in seconds], [pair[1] for pair in seconds], batch
            )
        )


def format_measurements(model: str, together: list[float], apart: list[float], batch: int) -> str:
    """Format the measurements as text.

    Args:
        model: Name of the model.
        together: Seconds of each step with the exchange.
        apart: Seconds of each step without the exchange.
        batch: Samples of a step, of all workers together.
    """
    exchanged, alone = statistics.median(together), statistics.median(apart)
    deciles = statistics.quantiles(together, n=10)
    return "\n".join(
        [
            (
                f"{model} transformer, {len(together)} steps of {batch} samples; "
                "medians of the first worker:"
            ),
            (
                f"  step with the exchange     {exchanged * 1e3:8.2f} ms   (8 of 10 between "
                f"{deciles[0] * 1e3:.2f} and {deciles[-1] * 1e3:.2f})"
            ),
            f"  step without               {alone * 1e3:8.2f} ms",
            (
                f"  the exchange adds          {(exchanged - alone) * 1e3:8.2f} "
                f"ms   ({(exchanged - alone) / alone:.1%})"
            ),
            f"  samples/s, all workers     {batch / exchanged:8.0f}",
        ]
    )


if __name__ == "__main__":
    main()
