"""paceline: the plain loop; `paceline run --min-workers` makes it survive."""

from __future__ import annotations

import task
from torch.utils.data import DataLoader

import paceline as pl


def main() -> None:
    asked = task.options(__doc__).parse_args()
    model, optimizer = task.build(asked.model)
    batch = asked.share * asked.workers
    loader = DataLoader(task.Numbered(asked.steps * batch), batch_size=batch)
    journal = task.Journal(asked.out)
    with pl.start(folder=str(asked.out / "runs"), trace="off") as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for _ in run.epochs(1):
            for ids, x, y in loader:
                # both change within the turn when a worker is lost
                attempt, size = len(run.events), run.size
                journal.began(run.rank, run.steps, ids.tolist() if run.weight else [], attempt)
                optimizer.zero_grad()
                task.loss_of(model(x), y).backward()
                optimizer.step()
                journal.ended(attempt, size)
        journal.finish(model)


if __name__ == "__main__":
    main()
