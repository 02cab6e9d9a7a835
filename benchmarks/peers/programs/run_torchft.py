"""torchft: every worker is a replica group of its own, all of which must be there for a step.

Started once per replica by `torchrun --nproc-per-node 1`, beside a lighthouse whose address is in
TORCHFT_LIGHTHOUSE.
"""

from __future__ import annotations

from datetime import timedelta

import workload
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    arguments = workload.parser(__doc__)
    arguments.add_argument(
        "--replica", type=int, required=True, help="number of this replica group"
    )
    arguments.add_argument("--address", required=True, help="where others reach this host")
    options = arguments.parse_args()
    job, patience = workload.Job(options), timedelta(seconds=300)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=job.model.load_state_dict,
        state_dict=job.model.state_dict,
        min_replica_size=options.workers,
        timeout=patience,
        quorum_timeout=patience,
        replica_id=f"replica-{options.replica}",
        hostname=options.address,
        init_sync=False,  # all begin with the same weights
    )
    model, optimizer = (
        DistributedDataParallel(manager, job.model),
        Optimizer(manager, job.optimizer()),
    )
    for x, y in job.turns(job.dealt(options.replica, options.workers)):
        optimizer.zero_grad()  # asks for the quorum of this step
        loss = workload.loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        job.note(loss)
    job.finish(
        options.replica, manager.num_participants(), "torchft", committed=manager.current_step()
    )
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
