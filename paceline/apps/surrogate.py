"""Trains a U-Net to replace a solver: it predicts the field of a dye in a flow in one pass.

    python -m paceline.apps.surrogate [--steps 200]         or under any launcher of several workers

    indices -> advection.py draws and solves -> (field, flow, diffusivity)
                                                   -> U-Net -> field after some time

summary.json has the errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import paceline as pl
from paceline.apps.advection import Advection, SolvedBatch, SolvedSamples, compute_relative_errors
from paceline.apps.unet import NORMS, UNet, UNetShape

HELD_OUT = 1 << 40  # index of the first validation sample; no training sample is as high

Predict = Callable[[Tensor], Tensor]  # from `SolvedBatch.given` to `SolvedBatch.after`


def build_model(shape: UNetShape, seed: int) -> UNet:
    """Make the same model in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UNet(shape)


def compute_loss(predicted: Tensor, after: Tensor) -> Tensor:
    """Compute the training loss: the mean over samples of the squared relative error."""
    return compute_relative_errors(predicted, after).square().mean()


def predict_unchanged(given: Tensor) -> Tensor:
    """Predict that the field doesn't change."""
    return given[:, :1]


@torch.no_grad()
def evaluate_errors(
    run: pl.Run, loader: DataLoader[SolvedBatch], ways: Mapping[str, Predict]
) -> dict[str, float]:
    """Compute the mean relative error of several predictions over a whole data set. Collective.

    Args:
        run: The run.
        loader: The prepared loader. Each worker sees some of its samples.
        ways: Predictions by name.
    """
    errors: dict[str, list[Tensor]] = {name: [] for name in ways}
    for given, after in loader:
        for name, predict in ways.items():
            errors[name].append(
                run.gather(
                    compute_relative_errors(predict(given.to(run.device)), after.to(run.device))
                )
            )
    return {name: torch.cat(parts).mean().item() for name, parts in errors.items()}


def train_model(
    run: pl.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: OneCycleLR,
    loader: DataLoader[SolvedBatch],
) -> None:
    """Take a step with each batch.

    Args:
        run: The run.
        model: The prepared model.
        optimizer: The prepared optimizer.
        schedule: The prepared schedule of the learning rate.
        loader: The prepared loader.
    """
    model.train()
    for given, after in loader:
        loss = compute_loss(model(given.to(run.device)), after.to(run.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.log(loss=loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="steps to train (default %(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=32,
        help="samples of a step, of all workers together (default %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=float,
        default=3e-3,
        help="highest learning rate of AdamW (default %(default)s)",
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=256,
        help="number of samples for the errors (default %(default)s)",
    )
    parser.add_argument(
        "--grid",
        type=int,
        default=32,
        help="points along each side, a power of 2 (default %(default)s)",
    )
    parser.add_argument(
        "--time",
        type=float,
        default=0.25,
        help="time to predict; the fastest flow crosses the square in 1 (default %(default)s)",
    )
    parser.add_argument(
        "--width", type=int, default=16, help="channels of the finest level (default %(default)s)"
    )
    parser.add_argument(
        "--levels",
        type=int,
        default=2,
        help="number of times that the grid is halved (default %(default)s)",
    )
    parser.add_argument(
        "--norm",
        choices=sorted(NORMS),
        default="group",
        help="norm of the layers (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of model and samples (default %(default)s)"
    )
    parser.add_argument("--name", default=None, help="name of the run folder")
    parser.add_argument("--folder", default="runs", help="folder of the run folders")
    options = parser.parse_args()
    # Each level halves the grid, and the grid of the coarsest level has to be even, too.
    if options.grid < 16 or options.grid % (2 * 2**options.levels):
        parser.error(
            f"--grid {options.grid} with --levels {options.levels}: give 16 or more, divisible by "
            f"{2 * 2**options.levels}"
        )

    equation = Advection(options.grid, options.time)
    shape = UNetShape(width=options.width, levels=options.levels, norm=options.norm)
    with pl.start(
        name=options.name, folder=options.folder, seed=options.seed, total_steps=options.steps
    ) as run:
        model = build_model(shape, run.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
        schedule = OneCycleLR(
            optimizer, max_lr=options.rate, total_steps=options.steps + 1, pct_start=0.1
        )
        loader = SolvedSamples(equation, run.seed, 0, options.steps * options.batch).make_loader(
            options.batch
        )
        # Validation samples are far away from those of training, whatever their number.
        held_out = SolvedSamples(equation, run.seed, HELD_OUT, options.held_out).make_loader(64)
        model, optimizer, schedule, loader, held_out = run.prepare(
            model, optimizer, schedule, loader, held_out
        )
        model.eval()
        # Only the trained model changes, so the other predictions are evaluated once.
        before = evaluate_errors(run, held_out, {"error_before": model})
        train_model(run, model, optimizer, schedule, loader)
        model.eval()
        after = evaluate_errors(
            run,
            held_out,
            {
                "error_after": model,
                "error_unchanged": predict_unchanged,
                "error_coarse_solver": equation.solve_coarsely,
            },
        )
        run.results.update(before | after)
        run.print(
            "relative error of the predicted field, against the solver: "
            f"{before['error_before']:.3f} before training, {after['error_after']:.3f} after it; "
            f"{after['error_unchanged']:.3f} for the prediction that nothing changes, "
            f"{after['error_coarse_solver']:.3f} for a solver on half the grid"
        )


if __name__ == "__main__":
    main()
