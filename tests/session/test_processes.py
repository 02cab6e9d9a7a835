"""What only real workers can show: the network path, generators of their own, runs one after the
other, what is left at exit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.jobs import Jobs

BODY = """
import hashlib, json, random
import numpy as np

def weights(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

def train(run, epochs, *, die=None, seed=0):
    model, optimizer, loader = parts(run, samples=52, shuffle=True)
    for set_seed in (torch.manual_seed, random.seed, np.random.seed):
        set_seed(seed + run.rank)
    resumed = run.resume()
    seen = []
    for epoch in run.epochs(epochs):
        for x, y in loader:
            step(run, model, optimizer, x + 0.1 * torch.rand_like(x), y)   # noise of each worker's own
            seen.append((run.steps, run.rank, float(torch.rand(())), random.random(), float(np.random.rand())))
            if run.steps + 1 == 5:
                run.save()
            if run.steps + 1 == die:
                return model, seen                           # in the middle of an epoch, on all workers
    return model, seen

results = {}
for via in ("auto", "native", "ring"):                       # several runs in one process, one after the other
    with pl.start(sync=pl.AllReduce(via=via, bucket_mb=0.00001), folder="via", name=via) as run:
        results[via] = weights(train(run, 1)[0])
first = []
for name, die in (("whole", None), ("cut", 6), ("cut", None)):
    with pl.start(folder="resumed", name=name) as run:
        model, seen = train(run, 2, die=die, seed=0 if die or name == "whole" else 7)
        gathered = run.group.gather_objects([weights(model), seen])
        first.append(gathered)
if run.is_first:
    with open("results.json", "w") as file:
        json.dump([results, first], file)
without = pl.start(folder="bare", name="bare")               # without `with`: closed at exit
parts(without)
"""  # noqa: E501


@pytest.mark.slow
def test_runs_one_after_the_other_in_two_processes(job: Jobs, tmp_path: Path) -> None:
    ended = job.run(BODY, 2).end()
    assert ended.code == 0, ended.err
    results, (whole, cut, resumed) = json.loads((tmp_path / "results.json").read_text())
    assert len(set(results.values())) == 1  # a sum of two has the same bits whichever way it came
    assert [one[0] for one in whole] == [whole[0][0]] * 2 and whole[0][0] == resumed[0][
        0
    ] == resumed[1][0]
    assert cut[0][0] != whole[0][0]
    for rank in (0, 1):  # each worker goes on with its own random numbers
        after = [tuple(entry) for entry in whole[rank][1] if entry[0] >= 5]
        assert [tuple(entry) for entry in resumed[rank][1]] == after and len(after) == 9
    assert whole[0][1][0][2:] != whole[1][1][0][2:]
    payload = 5 * 4  # bytes of the gradients of a linear layer
    for via in ("auto", "native", "ring"):
        found = json.loads((tmp_path / f"via/{via}/summary.json").read_text())
        assert found["workers"] == 2 and found["steps"] == 7 and found["samples"] == 52
        assert found["bytes_sent"]["within"] >= payload and found["bytes_sent"]["between"] == 0, (
            via,
            found["bytes_sent"],
        )
    assert (tmp_path / "bare/bare/summary.json").exists()
