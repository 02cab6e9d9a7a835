"""Trains by many strategies, one run for each, and says whether all is as it should be: the same
bits everywhere, and what equals what.

As a script of many workers, on processes or on hosts, it writes what each has seen.

    every_strategy.py FOLDER WAYS.json   WAYS: {name: strategy in its notation}; leaves
                                         FOLDER/NAME-RANK.json, NAME.pt and the run in NAME
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# more than twice the longest round, and than `after` begins; a batch that no number of workers
# divides
STEPS, BATCH, WIDTH = 9, 13, 48


CODECS = {
    "half": "half()",
    "int8": "int8(block=64)",
    "chance": "int8(block=64, rounding='stochastic')",
    "int4": "int4(block=32)",
    "sign": "error_feedback(sign(block=64))",
    "topk": "error_feedback(topk(0.05))",
    "randomk": "error_feedback(randomk(0.2))",
    "composed": "error_feedback(compose(topk(0.1), int8(block=16)))",
    "powersgd": "error_feedback(powersgd(2))",
    "powersgd-int8": "error_feedback(powersgd(2, inner=int8(block=16)))",
    "where": "where(smaller(100), exact(), error_feedback(topk(0.1)))",
    "after": "error_feedback(after(5, topk(0.1), before=half()))",
}
APART = {
    "every-1": "LocalSGD(every=1)",
    "every-4": "LocalSGD(every=4)",
    "diloco-plain": "LocalSGD(every=4, outer=nesterov(1.0, 0.0))",
    "diloco": "LocalSGD(every=4, outer=nesterov(0.7, 0.9), codec=int8(block=64))",
    "streaming": "LocalSGD(every=4, fragments=2, delay=1, alpha=0.5)",
    "ring": "Gossip(graph='ring')",
    "exponential": "Gossip(graph='exponential', codec=int8(block=64))",
    "full": "Gossip(graph='full')",
    "sequence": "Sequence((AllReduce(), 'local'), (LocalSGD(4), 'host'))",
}
WAYS = {
    "exact": "AllReduce()",
    **{name: f"AllReduce(codec={codec})" for name, codec in CODECS.items()},
    **APART,
}


def ask(folder: Path, ways: dict[str, str] = WAYS, **more: Any) -> str:
    """What the script shall train, as a file in `folder`."""
    path = folder / "ways.json"
    path.write_text(json.dumps({"ways": ways, **more}))
    return str(path)


def seen(folder: Path, name: str, size: int) -> list[dict[str, Any]]:
    """What the workers of a run have seen."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(size)]


def check(folder: Path, size: int, steps: int = STEPS, ways: Collection[str] = WAYS) -> None:
    """What has to hold of the runs in `folder`, which had so many steps. `ways`: their names."""
    import pytest  # not in the workers

    weights = {}
    for name in ways:
        workers = seen(folder, name, size)
        assert len({worker["digest"] for worker in workers}) == 1, (
            f"{name}: weights differ at the end"
        )
        if name not in APART:
            assert [worker["grads"] for worker in workers] == [workers[0]["grads"]] * size, (
                f"{name}: gradients differ"
            )
            assert len(set(workers[0]["grads"])) == steps
        elif name != "sequence" or len({worker["host"] for worker in workers}) > 1:
            assert len({tuple(worker["grads"]) for worker in workers}) > 1, (
                f"{name}: all workers saw the same samples"
            )
        weights[name] = torch.load(folder / f"{name}.pt").tolist()
    for codec in CODECS.keys() & ways:
        assert weights[codec] != weights["exact"], f"{codec}: it wasn't used"
    for one, other in (("every-1", "exact"), ("full", "exact"), ("diloco-plain", "every-4")):
        if one not in ways:
            continue
        assert weights[one] == pytest.approx(weights[other], rel=1e-4, abs=1e-6), (
            f"{one} is not {other}"
        )
    assert weights["every-4"] != pytest.approx(weights["exact"], rel=1e-4, abs=1e-6)


def digest(tensors: list[Tensor]) -> str:
    """A hash of all bits."""
    return hashlib.sha256(
        b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)
    ).hexdigest()


def leaving() -> int:
    """Bytes that the links of this host have sent."""
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return sum(int(words[9]) for words in lines if words[0] != "lo:")


def train(name: str, notation: str, folder: Path, width: int = WIDTH, steps: int = STEPS) -> None:
    """One run of so many steps; every worker has other samples."""
    import paceline as pl

    numbers = torch.Generator().manual_seed(5)
    x = torch.randn(steps * BATCH, 8, generator=numbers)
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader: DataLoader[Any] = DataLoader(TensorDataset(x, x[:, :3].sin()), BATCH)
    grads, between = [], [0, 0]
    with pl.start(notation, name=name, folder=str(folder), seed=1) as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for step, (a, b) in enumerate(loader):
            if step == 1:  # the first one lays out buckets and measures the link
                run.barrier()
                between[0] = leaving()
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            grads.append(digest([p.grad for p in model.parameters() if p.grad is not None]))
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.barrier()  # what was sent to others has left
        between[1] = leaving()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    seen = {
        "grads": grads,
        "digest": digest([weights]),
        "left": between[1] - between[0],
        "host": run.host,
    }
    (folder / f"{name}-{run.rank}.json").write_text(json.dumps(seen))
    if run.is_first:
        torch.save(weights, folder / f"{name}.pt")


def main() -> None:
    folder, asked = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    for name, notation in asked["ways"].items():
        train(name, notation, folder, asked.get("width", WIDTH), asked.get("steps", STEPS))


if __name__ == "__main__":
    main()
