"""Compares the backends "paceline" and "gloo" of torch.distributed.

Scripts that don't know paceline call `init_process_group` with one or the other. Two crews run the
same programs, DDP, FSDP2 and tensor parallelism by hand, and take turns. At the end the weights of
both have to agree.

    python benchmarks/backend.py [--programs ddp fsdp2 tensor] [--workers 2] [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import Crew, Message, Row, arguments, interleave, ratio, report, serve
from training import SETUPS, build, dealt, place

HERE = Path(__file__).resolve().parent
MODEL = "gpt-19m"
BACKENDS = ("gloo", "paceline")
BARS = {"ddp": 1.15, "fsdp2": 1.4, "tensor": 1.25}  # lowest ratio of the times
AWAY = 1e-4  # highest |difference| / |weights| between the backends after all rounds


def ddp(model: Any) -> Any:
    """Wrap a model, as in the tutorial of DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def fsdp2(model: Any) -> Any:
    """Shard each block of a model, then the rest, as in the tutorial of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def tensor(model: Any) -> Any:
    """Cut the layers of a model, as in the tutorial of tensor parallelism.

    Each worker has a part of the heads.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        # The plan cuts queries, keys and values as one layer, so heads are counted by hand.
        block.attention.heads //= mesh.size()
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        attend(block.attention, model.shape.d // mesh.size())
    return model


def attend(attention: Any, width: int) -> None:
    """Replace the forward method of an attention module, so that it uses the heads of this worker.

    `width` is the width of these heads.
    """
    from torch.nn import functional as F

    def forward(x: Any) -> Any:
        batch, tokens, _ = x.shape
        q, k, v = (
            attention.qkv(x)
            .view(batch, tokens, 3, attention.heads, width // attention.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attention.out(mixed.transpose(1, 2).reshape(batch, tokens, width))

    attention.forward = forward


PROGRAMS: dict[str, Callable[[Any], Any]] = {"ddp": ddp, "fsdp2": fsdp2, "tensor": tensor}


class Worker:
    """A worker with all programs on one backend.

    Args:
        backend: Name of the backend.
        rank: Rank of this worker.
        size: Number of workers.
        programs: Names of the programs.
    """

    def __init__(self, backend: str, rank: int, size: int, programs: list[str]) -> None:
        import torch
        import torch.distributed as dist

        if backend == "paceline":
            # The import registers the backend.
            import paceline.backend  # noqa: F401

        torch.set_num_threads(1)
        dist.init_process_group(backend)
        self.models: dict[str, Any] = {}
        self.programs = {name: self.train(name, rank, size) for name in programs}

    def train(self, name: str, rank: int, size: int) -> Iterator[None]:
        """Train a step whenever the next item is taken.

        Args:
            name: Name of the program.
            rank: Rank of this worker.
            size: Number of workers.
        """
        import torch

        model, loss, data = build(MODEL)
        self.models[name] = model
        wrapped = PROGRAMS[name](model)
        # Workers that cut the layers of one model have the same samples.
        loader = dealt(data, MODEL, 0, 1) if name == "tensor" else dealt(data, MODEL, rank, size)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
        while True:
            for x, y in loader:
                value = loss(wrapped(x), y)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield

    def handle(self, message: Message) -> Message:
        if "program" not in message:
            return {name: self.weights(name) for name in self.programs}
        program = self.programs[message["program"]]
        next(program)  # warm the caches, and bring the workers together
        start = time.perf_counter()
        for _ in range(message["steps"]):
            next(program)
        return {"seconds": (time.perf_counter() - start) / message["steps"]}

    def weights(self, name: str) -> list[float]:
        """Take a sample of the weights, to compare the backends."""
        import torch
        from torch.distributed.tensor import DTensor

        full_weights = [
            parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            for parameter in self.models[name].parameters()
        ]
        return [
            float(value)
            for value in torch.cat([parameter.detach().reshape(-1) for parameter in full_weights])[
                ::997
            ]
        ]


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure a step of each program on both backends, in turn.

    Returns the seconds of each in each round. Raises `RuntimeError` if the weights of the backends
    differ at the end.
    """
    # Both crews run at once, but one sleeps while the other works.
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(options.workers),
    ]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        crews = {}
        for backend in BACKENDS:
            command = [
                *launch,
                str(HERE / "backend.py"),
                "--serve",
                backend,
                "--programs",
                *options.programs,
            ]
            crews[backend] = stack.enter_context(
                Crew(backend, [command], options.workers, folder=folder)
            )

        def asking(backend: str, program: str) -> Callable[[], float]:
            steps = options.steps or SETUPS[MODEL].steps
            return lambda: max(
                answer["seconds"] for answer in crews[backend].ask(program=program, steps=steps)
            )

        variants = {
            f"{program} on {backend}": asking(backend, program)
            for program in options.programs
            for backend in BACKENDS
        }
        samples = interleave(variants, options.rounds, warmup=2)
        # Weights are the same on all workers, so the first one answers for all.
        theirs, ours = (crews[backend].ask()[0] for backend in BACKENDS)
    for program in options.programs:
        squares = sum(value**2 for value in theirs[program])
        pairs = zip(theirs[program], ours[program], strict=True)
        distance = (sum((one - other) ** 2 for one, other in pairs) / squares) ** 0.5
        if distance > AWAY:
            raise RuntimeError(
                f"{program}: the weights on the backends are {distance:.2e} apart, "
                f"more than {AWAY:g}"
            )
    return samples


def main() -> None:
    parser = arguments(__doc__ or "", "backend", rounds=30)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps of a round (default: by model)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        rank, size = place()
        serve(rank, Worker(options.serve, rank, size, options.programs).handle)
        return
    samples = measure(options)
    rows = []
    for program in options.programs:
        theirs, ours = (samples[f"{program} on {backend}"] for backend in BACKENDS)
        seconds = {"gloo": statistics.median(theirs), "paceline": statistics.median(ours)}
        what = f"{program} by hand, GPT 19 M, {options.workers} workers"
        rows.append(
            Row(what, seconds, "step: gloo / paceline", ratio(theirs, ours), least=BARS[program])
        )
    if not report("backend", rows, options, samples) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
