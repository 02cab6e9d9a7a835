"""Batches that a script makes by itself are the same with any number of workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.data.own_batches import OwnShare, own_batches
from paceline.session.run import Run
from tests.harness.jobs import Jobs
from tests.harness.runs import parameters, workers

WINDOW, SIZE, STEPS = 6, 64, 5
TEXT = torch.randint(11, (400,), generator=torch.Generator().manual_seed(3))


def make_model() -> Any:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(8 * WINDOW, 11)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return model


def make_batches() -> Any:
    # Workers of these tests are threads, which share torch's own generator.
    return own_batches(SIZE, steps=STEPS, generator=torch.Generator().manual_seed(9))


def get_batch(share: OwnShare) -> tuple[torch.Tensor, torch.Tensor]:
    """nanoGPT's function, of this worker's rows."""
    ix = share.draw(
        lambda generator: torch.randint(len(TEXT) - WINDOW, (SIZE,), generator=generator)
    )
    return torch.stack([TEXT[i : i + WINDOW] for i in ix]), TEXT[ix + WINDOW]


def train(
    passes: int = 1, parts: int = 1, *, lockstep: bool = True, **options: Any
) -> Callable[[Run], Any]:
    """A nanoGPT-like loop; `parts` micro-batches of random windows in each step."""

    def body(run: Run) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        model, optimizer, batches = run.prepare(model, optimizer, make_batches(), **options)
        losses, seen = [], []
        for _ in run.epochs(passes):
            for share in batches:
                for part in range(parts):
                    x, y = get_batch(share)
                    loss = F.cross_entropy(model(x), y) / parts
                    if part < parts - 1:
                        with run.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                losses.append(run.mean(loss.detach()) if lockstep else loss.detach())
                seen.append((share.step, share.rows if run.weight else [], x.sum().item()))
        return parameters(model), torch.stack(losses), seen

    return body


def by_plain_torch(passes: int = 1, parts: int = 1) -> torch.Tensor:
    """The same training without paceline: one process with the whole of each batch."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    batches = make_batches()
    for _ in range(passes):
        for share in batches:
            for _ in range(parts):
                x, y = get_batch(share)
                (F.cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {}),  # shares of 22, 21 and 21
        (2, {"shares": "auto"}),
        (3, {"shares": [5, 1, 0]}),  # the last worker has no samples: a ghost
    ],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_a_loop_that_draws_windows_trains_on_the_global_batch(
    size: int, options: dict[str, Any], parts: int
) -> None:
    wanted = by_plain_torch(passes=2, parts=parts)
    found = workers(size, train(passes=2, parts=parts, **options))
    for weights, losses, _ in found:
        torch.testing.assert_close(weights, wanted, rtol=1e-9, atol=1e-12)
        assert torch.equal(losses, found[0][1])
    for turn in range(2 * STEPS):
        shares = [seen[turn] for _, _, seen in found]
        assert {step for step, _, _ in shares} == {turn % STEPS}
        assert sorted(row for _, rows, _ in shares for row in rows) == list(range(SIZE))


def test_each_pass_and_each_step_draws_other_windows() -> None:
    ((_, _, seen),) = workers(1, train(passes=2))
    assert len({checksum for _, _, checksum in seen}) == 2 * STEPS


def test_rows_that_are_drawn_again_without_draw_would_be_those_of_the_first_worker() -> None:
    """What `draw` is for: without it the workers would train on the same windows."""

    def body(run: Run) -> Any:
        batches = run.prepare(make_batches())
        return [
            (
                torch.randint(1000, (len(share),), generator=share.generator)[:8].tolist(),
                share.draw(lambda generator: torch.rand(SIZE, generator=generator))[:8].tolist(),
            )
            for share in batches
        ]

    first, second = workers(2, body)
    for (alike, own), (other_alike, other_own) in zip(first, second, strict=True):
        assert alike == other_alike and own != other_own


@pytest.mark.parametrize(
    "sync", [pl.LocalSGD(2), pl.Gossip(), pl.AllReduce(codec=pl.int8()), pl.ParameterServer()]
)
def test_other_strategies_train_on_the_same_batches(sync: Any) -> None:
    found = workers(3, train(), strategy=sync)
    wanted = workers(1, train())[0]
    assert torch.isfinite(found[0][0]).all()
    for turn in range(STEPS):
        rows = sorted(row for _, _, seen in found for row in seen[turn][1])
        assert rows == list(range(SIZE))
        # the sums of the windows are those of the whole batch
        assert sum(seen[turn][2] for _, _, seen in found) == wanted[2][turn][2]


def test_workers_out_of_lockstep_share_each_batch() -> None:
    """Each row of each batch goes to one worker, whichever asks first."""
    found = workers(2, train(lockstep=False), strategy=pl.ParameterServer(staleness=2))
    dealt = sorted((step, row) for _, _, seen in found for step, rows, _ in seen for row in rows)
    assert dealt == [(step, row) for step in range(STEPS) for row in range(SIZE)]


def test_micro_batches_of_a_step_cut_the_share() -> None:
    def body(run: Run) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        model, optimizer, batches = run.prepare(model, optimizer, make_batches())
        for share in batches:
            run.step(model, *get_batch(share), loss=F.cross_entropy, micro_batches=4)
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    for weights in workers(3, body):
        torch.testing.assert_close(weights, by_plain_torch(), rtol=1e-9, atol=1e-12)


def test_an_evaluation_of_few_rows_leaves_workers_without_any() -> None:
    def body(run: Run) -> Any:
        batches = run.prepare(own_batches(2, steps=1, generator=torch.Generator().manual_seed(1)))
        with torch.no_grad():
            return [
                (
                    run.gather(share.draw(lambda one: torch.rand(2, generator=one))).tolist(),
                    len(share),
                )
                for share in batches
            ]

    found = workers(3, body)
    assert [length for ((_, length),) in found] == [1, 1, 0]
    ((gathered, _),) = found[0]
    assert gathered == found[2][0][0] and gathered[0] != gathered[1]


def test_what_cannot_be_drawn_is_refused_in_one_line() -> None:
    (share,) = own_batches(4, steps=1)
    with pytest.raises(pl.UsageError, match=r"got \(3,\), and needs .* each of the 4 samples"):
        share.draw(lambda generator: torch.rand(3, generator=generator))
    with pytest.raises(pl.UsageError, match=r"share\.draw got int"):
        share.draw(lambda generator: 4)
    for size, steps in ((0, 1), (1, 0), (1 << 16, 1 << 16)):
        with pytest.raises(pl.UsageError, match="give 1 or more of both"):
            own_batches(size, steps=steps)


SCRIPT = """
import json, signal
from pathlib import Path

WINDOW, SIZE = 6, 64
text = torch.randint(11, (400,), generator=torch.Generator().manual_seed(3))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(8 * WINDOW, 11)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
out = Path(os.environ["OUT"])
with pl.start(name="run") as run:
    model, optimizer, batches = run.prepare(model, optimizer, pl.own_batches(SIZE, steps=12))
    run.resume() if os.environ.get("RESUMES") else None
    seen = (out / f"seen-{os.getpid()}").open("a")
    for share in batches:
        ix = share.draw(lambda generator: torch.randint(394, (SIZE,), generator=generator))
        if run.weight:
            seen.write(json.dumps([run.steps, len(run.events), -run.size, share.rows, ix.tolist()]) + "\\n"); seen.flush()
        x, y = torch.stack([text[i : i + WINDOW] for i in ix]), text[ix + WINDOW]
        nn.functional.cross_entropy(model(x), y).backward()
        if os.environ.get("DIES") and rank == 1 and run.steps == 5 and not (out / "died").exists():
            (out / "died").touch(); os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if os.environ.get("STOPS") and run.steps == 5:
            run.save()
            break
    if run.is_first:
        torch.save(torch.cat([p.detach().flatten() for p in model.parameters()]), out / "weights.pt")
"""  # noqa: E501


def read_outcome(out: Path) -> tuple[torch.Tensor, dict[int, list[tuple[int, int]]]]:
    """Weights, and the row and window of each sample by step, as they were dealt last."""
    dealt: dict[int, dict[tuple[int, int], list[tuple[int, int]]]] = {}
    for path in out.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, events, size, rows, windows = json.loads(line)
            dealing = dealt.setdefault(step, {}).setdefault((events, size), [])
            dealing += [pair for pair in zip(rows, windows, strict=True) if pair not in dealing]
    return torch.load(out / "weights.pt"), {
        step: sorted(dealings[max(dealings)]) for step, dealings in dealt.items()
    }


def run_job(job: Jobs, name: str, size: int, *options: str, **environ: Any) -> Any:
    out = job.folder / name
    os.makedirs(out, exist_ok=True)
    ended = job.run(SCRIPT, size, *options, OUT=str(out), **environ).end()
    assert ended.code == 0, ended
    return read_outcome(out)


@pytest.mark.slow
def test_a_killed_worker_and_a_resumed_run_change_no_batch(job: Jobs) -> None:
    """Ids: the row and the window of each sample, of the last time that its step was dealt."""
    weights, samples = run_job(job, "alone", 1)
    assert [len(samples[step]) for step in range(12)] == [64] * 12
    lost_weights, lost_samples = run_job(job, "lost", 3, "--min-workers", "1", DIES="1")
    assert (job.folder / "lost" / "died").exists()
    assert lost_samples == samples
    torch.testing.assert_close(lost_weights, weights, rtol=1e-9, atol=1e-12)
    # saved in the middle of a pass by two workers, and resumed by three
    run_job(job, "resumed", 2, STOPS="1")
    resumed_weights, resumed_samples = run_job(job, "resumed", 3, RESUMES="1")
    assert resumed_samples == samples
    torch.testing.assert_close(resumed_weights, weights, rtol=1e-9, atol=1e-12)
