"""Trains the small GPT on the standard library's sources.

It is the script that `paceline demo` runs on every worker.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Subset

import paceline as pl
from paceline.apps import source_text
from paceline.apps.generation import Sampling, generate_tokens
from paceline.apps.gpt import GPT, SMALL, make_cuts, next_token_loss
from paceline.session.load import DESCRIPTION, describe_model

BATCH = 32  # samples of a step, of all workers together
VALIDATION = 1024  # windows in the validation set
PROMPT = "def "  # begin of the sample of text


class TrainingTask(NamedTuple):
    """A model that is the same in every process, and batches that don't depend on the workers."""

    model: GPT
    train: DataLoader[tuple[Tensor, Tensor]]
    validation: DataLoader[tuple[Tensor, Tensor]]


def make_task(steps: int, folder: Path | None = None) -> TrainingTask:
    """Make the model and the data of the demo.

    The first batches are the same for any `steps`. `folder` has .py files to learn from. Default:
    Python's standard library.
    """
    train, validation = source_text.make_datasets(SMALL.context, folder=folder)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(train), generator=generator)
    # A small text is read several times.
    rows = rows.repeat(-(-steps * BATCH // len(rows)))[: steps * BATCH]
    held_out = torch.randperm(len(validation), generator=generator)[:VALIDATION]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(SMALL)
    return TrainingTask(
        model,
        DataLoader(Subset(train, rows.tolist()), batch_size=BATCH),
        DataLoader(Subset(validation, held_out.tolist()), batch_size=256),
    )


@torch.no_grad()
def evaluate_loss(
    run: pl.Run, model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]
) -> float:
    """Compute the mean loss over a whole data set. Collective.

    Args:
        run: The run.
        model: The prepared model.
        loader: The prepared loader. Each worker sees some of its rows.
    """
    losses = []
    for x, y in loader:
        logits = run.forward(model, x.to(run.device))
        losses.append(
            run.gather(
                F.cross_entropy(logits.transpose(1, 2), y.to(run.device), reduction="none").mean(1)
            )
        )
    return torch.cat(losses).mean().item()


def generate_sample(run: pl.Run, model: GPT, count: int = 240) -> str:
    """Continue "def " by the model. Collective.

    Args:
        run: The run.
        model: The prepared model.
        count: Number of tokens. Default: 240.
    """
    prompt = PROMPT.encode()
    model.eval()
    return source_text.decode_tokens(
        torch.tensor(
            [
                *prompt,
                *generate_tokens(run, model, prompt, count, Sampling(temperature=0.7, seed=1)),
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True, help="number of steps to train")
    parser.add_argument(
        "--of", type=int, required=True, help="number of steps in the plan of the learning rate"
    )
    parser.add_argument("--name", required=True, help="name of the run folder")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    parser.add_argument(
        "--text",
        type=Path,
        default=None,
        help="a folder of .py files instead of the standard library",
    )
    parser.add_argument(
        "--brief", action="store_true", help="only train: no validation, no sample, no checkpoint"
    )
    parser.add_argument(
        "--kill", type=int, default=None, help="kill the last worker after this number of steps"
    )
    options = parser.parse_args()

    model, loader, held_out = make_task(options.steps, options.text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.of + 1, pct_start=0.1)
    with pl.start(name=options.name, folder=options.folder, total_steps=options.steps) as run:
        prepared = run.prepare(
            model, optimizer, schedule, loader, held_out, cut=make_cuts(run.mesh.cut_axes)
        )
        model, optimizer, schedule, loader, held_out = prepared
        before = 0.0 if options.brief else evaluate_loss(run, model, held_out)
        workers = run.size
        for x, y in loader:
            # The kernel does the same when memory runs out. In the smaller group nothing is killed.
            if run.steps == options.kill and run.size == workers and run.rank == workers - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            # Forward and backward, in any mesh.
            loss = run.step(model, x.to(run.device), y.to(run.device), loss=next_token_loss)
            run.clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.log(loss=loss)
        if options.brief:
            return
        after = evaluate_loss(run, model, held_out)
        sample = generate_sample(run, model)
        if run.is_first:
            outcome = {"validation": [before, after], "sample": sample}
            (run.folder.path / "demo.json").write_text(json.dumps(outcome))
            (run.folder.path / DESCRIPTION).write_text(describe_model("gpt", asdict(SMALL)))
        run.save(keep=1, metric=after, best="min")


if __name__ == "__main__":
    main()
