"""paceline, with the strategy that `--sync` says."""

from __future__ import annotations

import json

import task
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline as pl


def main() -> None:
    parser = task.arguments(__doc__)
    parser.add_argument("--sync", default="AllReduce()")
    options = parser.parse_args()
    job = task.Task(options)
    with pl.start(options.sync, folder=str(options.out), name="run") as run:
        course = task.Course(run.rank, run.size)
        optimizer = job.optimizer()
        model, optimizer, schedule, loader, held_out = run.prepare(
            job.model,
            optimizer,
            job.schedule(optimizer),
            DataLoader(job.train, batch_sampler=job.sampler()),
            job.held_out,
        )

        def stretch() -> list[Tensor]:
            losses = []
            for x, y in loader:
                loss = task.loss_of(model, x, y)
                loss.backward()
                run.clip(model, task.CLIP)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                run.log(loss=loss)
                losses.append(loss.detach())
            return losses

        @torch.no_grad()
        def evaluate() -> float:
            rows = [
                run.gather(F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1))
                for x, y in held_out
            ]
            return float(torch.cat(rows).mean())

        job.run(course, stretch, evaluate)
    if run.is_first:
        summary = json.loads(run.folder.summary.read_text())
        course.sent = sum(summary["bytes_sent"].values())
        lines = map(json.loads, run.folder.metrics.read_text().splitlines())
        course.losses = [line["loss"] for line in lines if "loss" in line]
    course.write(options.out)


if __name__ == "__main__":
    main()
