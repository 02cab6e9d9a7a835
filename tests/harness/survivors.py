"""A training whose workers are killed, and the check that nobody could tell from what came out:
each sample once, the same weights.
"""

from __future__ import annotations

import json
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.harness.jobs import Job, Jobs, wait_for

SAMPLES, BATCH = 192, 16

# Every worker writes what it is about to train on: step, which dealing it is of (events, and less
# workers for those of one event), samples.
SCRIPT = """
import json, os, signal
from pathlib import Path

class Numbered(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (torch.randn(192, width, generator=generator, dtype=torch.float64) for width in (8, 1))
    def __len__(self):
        return 192
    def __getitem__(self, index):
        return index, self.x[index], self.y[index]

torch.manual_seed(0)
{model}
optimizer = {optimizer}
loader = DataLoader(Numbered(), batch_size=16, shuffle=True, num_workers={readers})
out = Path(os.environ["OUT"])
seen = (out / f"seen-{{os.getpid()}}").open("a")
times = (out / f"times-{{os.getpid()}}").open("a")

def die(now, where):
    if now and not (out / where).exists():
        (out / where).touch()
        os.kill(os.getpid(), signal.SIGKILL)

with pl.start({start}) as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader{options})
    {prepared}
    for epoch in run.epochs({epochs}):
        for index, x, y in loader:
            if run.weight:
                seen.write(json.dumps([run.steps, [len(run.events), -run.size], index.tolist()]) + "\\n"); seen.flush()
            (out / f"ready-{{os.getpid()}}").touch()
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            {before}
            loss.backward()
            {between}
            optimizer.step()
            {after}
            run.log(loss=loss)
            times.write(f"{{time.time()}}\\n"); times.flush()
            while run.steps == {held} and not (out / "go").exists(): time.sleep(0.01)
            time.sleep({nap})
        {epoch_end}
    if run.is_first:
        torch.save([p.detach() for p in {saved}], out / "weights.pt")
        (out / "events.json").write_text(json.dumps([event["what"] for event in run.events]))
        (out / "size").write_text(str(run.size))
"""  # noqa: E501
NET = "model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()"


def script(**parts: Any) -> str:
    """The training, with `before`, `between`, `after` its backward and `epoch_end` as given.

    After the step `held` all workers wait for `let_go`, so that what a test does to them from
    outside happens while they train.
    """
    usual = {
        "model": NET,
        "optimizer": "torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)",
        "readers": 0,
        "start": "name='run'",
        "prepared": "pass",
        "epochs": 3,
        "saved": "model.parameters()",
        "options": "",
        "nap": 0.02,
        "held": -1,
        **dict.fromkeys(("before", "between", "after", "epoch_end"), "pass"),
    }
    return SCRIPT.format(**(usual | parts))


class Outcome(NamedTuple):
    """What a training came to."""

    weights: list[torch.Tensor]
    samples: dict[int, list[int]]  # of each step, those that its last dealing had
    events: list[str]
    size: int
    logged: list[int]  # the steps in metrics.jsonl


def outcome(out: Path, folder: Path) -> Outcome:
    """Read it."""
    dealt: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for path in out.glob("seen-*"):
        # a worker that was told of a loss before its turn began has it twice: the first time
        # without a result
        mine = {}
        for line in path.read_text().splitlines():
            step, dealing, samples = json.loads(line)
            mine[step, tuple(dealing)] = samples
        for (step, dealing), samples in mine.items():
            dealt.setdefault(step, {}).setdefault(dealing, []).extend(samples)
    samples = {step: sorted(found[max(found)]) for step, found in dealt.items()}
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    events = json.loads((out / "events.json").read_text())
    logged = [json.loads(line)["step"] for line in lines if "samples" in json.loads(line)]
    return Outcome(
        torch.load(out / "weights.pt"), samples, events, int((out / "size").read_text()), logged
    )


def apart(one: Outcome, other: Outcome) -> float:
    """How far the weights are from each other, relative to their size."""
    a, b = (
        torch.cat([x.reshape(-1) for x in outcome.weights]).double() for outcome in (one, other)
    )
    return float((a - b).norm() / b.norm())


def play(job: Jobs, name: str, *options: str, workers: int = 4, **parts: Any) -> Outcome:
    """Run it to its end."""
    out = job.folder / name
    out.mkdir()
    more = parts.pop("more", None)  # arguments of start
    start = f"name='run', folder='{name}/runs'{'' if more is None else f', {more}'}"
    launched = job.run(script(start=start, **parts), workers, *options, OUT=str(out))
    ended = launched.end()
    assert ended.code == 0, ended
    return outcome(out, out)


def check(outcome: Outcome, wanted: Outcome, *, close: float = 1e-12) -> None:
    """Each sample once, the same weights, every step in the log."""
    other = {
        step: (samples, outcome.samples.get(step))
        for step, samples in wanted.samples.items()
        if samples != outcome.samples.get(step)
    }
    assert not other, (other, outcome.events)
    assert apart(outcome, wanted) < close
    assert outcome.logged == list(range(1, len(wanted.samples) + 1))


def until(events: int | str, nap: float = 0.3) -> str:
    """A nap (seconds) in each turn, until so much has happened in the run, or something that is
    told in these words.
    """
    happened = (
        f"len(run.events) >= {events}"
        if isinstance(events, int)
        else f"any({events!r} in event['what'] for event in run.events)"
    )
    return f"0 if {happened} else {nap}"


def trains(job: Job, out: Path, workers: int) -> None:
    """Wait until all workers are in their first turn."""
    wait_for(lambda: job.process.poll() is not None or len(list(out.glob("ready-*"))) >= workers)
    assert len(list(out.glob("ready-*"))) >= workers, job.end()


def let_go(out: Path) -> None:
    """Let workers go on that are held after a step, or will be."""
    (out / "go").touch()


def kill(job: Job, chance: random.Random, number: int = signal.SIGKILL) -> None:
    """A random worker."""
    workers = job.workers()
    if workers:
        chance.choice(workers).send_signal(number)


def gap(out: Path) -> float:
    """The longest time (seconds) in which nobody ended a turn: far below 120 unless somebody
    waited for the deadline.
    """
    moments = sorted(
        float(line) for path in out.glob("times-*") for line in path.read_text().splitlines()
    )
    return max(b - a for a, b in pairwise(moments))


def pause(chance: random.Random, longest: float) -> None:
    """Up to so many seconds."""
    time.sleep(chance.uniform(0, longest))


AT = "run.rank == {rank} and run.steps == "
PLACES = {
    "before": "die({at}4, 'forward')",
    "prepared": "next(model.parameters()).register_hook(lambda _: die({at}7, 'the last gradient'))",
    "between": "die({at}10, 'before the step')",
    "after": "die({at}13, 'after the step')",
    "epoch_end": "die(run.rank == {rank} and epoch == 1, 'between epochs')",
}
