"""paceline, as its README has it: the batch in the loader is the global one."""

from __future__ import annotations

import workload

import paceline as pl


def main() -> None:
    arguments = workload.parser(__doc__)
    arguments.add_argument("--sync", help="a strategy in its notation (default: AllReduce())")
    asked = arguments.parse_args()
    job = workload.Job(asked)
    with pl.start(asked.sync, folder=str(job.options.out), name="run") as run:
        model, optimizer, loader = run.prepare(job.model, job.optimizer(), job.loader(job.batch))
        for x, y in job.turns(loader):
            loss = workload.loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            job.note(loss)
    # replicas are equal, whatever the strategy, once the run has ended
    job.finish(run.rank, run.size, "paceline")


if __name__ == "__main__":
    main()
