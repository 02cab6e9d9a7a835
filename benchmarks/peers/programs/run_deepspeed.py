"""DeepSpeed on processors, ZeRO stage 1: every worker steps its own part of the parameters and
gathers the others'.
"""

from __future__ import annotations

import os

import workload

# without it the processors' backend dies
os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed


def main() -> None:
    job = workload.Job(workload.parser(__doc__).parse_args())
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": job.share,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # it clips to 1.0 unless told not to
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,  # plain SGD isn't on its list
    }
    engine, *_ = deepspeed.initialize(model=job.model, optimizer=job.optimizer(), config=config)
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    for x, y in job.turns(job.dealt(rank, size)):
        loss = workload.loss_of(engine(x), y)
        engine.backward(loss)
        engine.step()
        job.note(loss)
    job.finish(rank, size, "deepspeed", model=engine.module)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
