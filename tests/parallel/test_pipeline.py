"""Pipelines against one process: every schedule, ties, shares, other cuts beside, and what can't
be done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import paceline as pl
from paceline.errors import DataError, PacelineError, UsageError
from paceline.parallel.pipeline import pipeline
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from tests.harness.layered_models import Masked
from tests.harness.models import fill
from tests.harness.pipelines import LAYERS, TENSOR, gpt, next_tokens, same, trained
from tests.harness.runs import Numbered, workers


def untied() -> nn.Module:
    return gpt(tied=False)


def short() -> nn.Module:
    return gpt(layers=2)


# two steps, which is what there is time for with eight workers
SHORT: dict[str, Any] = {"build": short, "epochs": 1}


@pytest.mark.each_choice
@pytest.mark.parametrize("mesh", ["stage=2", "stage=4"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_pipeline_ends_where_one_process_does(mesh: str, schedule: str) -> None:
    # tied embeddings, a last batch of 5 for 4 micro-batches, clipping, AdamW
    same(mesh, pipeline(LAYERS, schedule=schedule, micro_batches=4))


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_worker_may_have_two_stages(schedule: str) -> None:
    same("stage=2", pipeline(LAYERS, schedule=schedule, micro_batches=4))


def test_replicas_of_a_pipeline_share_batches() -> None:
    same("data=2, stage=2", pipeline(LAYERS, micro_batches=4), options={"shares": [3, 1]})
    same("data=2, stage=2", pipeline(LAYERS, schedule="interleaved", micro_batches=3))


@pytest.mark.alike(2)
@pytest.mark.parametrize("zero", [3, 2, 1])
def test_what_a_stage_has_may_be_shared_out(zero: Any) -> None:
    # the last batch gives one worker 3 samples and the other 2: both go through 4 micro-batches
    # the embedding is tied to the head, which the other stage has
    same("shard=2, stage=2", [pipeline(LAYERS, micro_batches=4), pl.shard("blocks.*", zero=zero)])


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [(AllReduce(codec=pl.int8()), 1), (pl.LocalSGD(2), 2), (AllReduce(codec=pl.int8()), 3)],
)
def test_pieces_of_tied_weights_stay_equal_where_replicas_round_them(
    strategy: Any, zero: Any
) -> None:
    def ends(run: Run, model: nn.Module) -> list[float]:
        cuts = run._prepared.cuts
        pieces = [
            cuts.trained_tensor(parameter)
            for name, parameter in model.named_parameters()
            if name == "tokens.weight"
        ]
        for piece in pieces:
            piece.data.add_(run.rank / 1000)
        run.step(model, X, Y, loss=next_tokens)  # which begins with what the first stage has
        seen = pieces if zero == 3 else [model.tokens.weight, model.head.weight]  # type: ignore[union-attr]
        return [float(part.detach().sum()) for part in [*pieces, *seen]]

    cut = [pipeline(LAYERS, micro_batches=2), pl.shard("blocks.*", zero=zero)]
    found = [
        said
        for _, _, said in workers(
            8, trained(cut, ended=ends, **SHORT), mesh="data=2, stage=2, shard=2", strategy=strategy
        )
    ]
    replicas = [sorted(set(map(tuple, found[start : start + 4]))) for start in (0, 4)]
    # those of two workers along `shard`, the same on both stages
    for (one, *whole), (two, *_) in replicas:
        assert zero == 3 or whole == pytest.approx([one + two] * 2, rel=1e-12)


class Gated(nn.Module):
    """A layer that few rows go through, so that some micro-batches reach none of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on = x.detach()[:, :1] > 0.3
        return torch.where(on, torch.tanh(self.line(x)), x) if bool(on.any()) else x * 1.0


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_stage_may_be_reached_on_one_worker_and_not_on_another(schedule: Any) -> None:
    def build() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(6, 6), Gated(), nn.Linear(6, 2)).double())

    cut = [pipeline("0, 1, 2", schedule=schedule, micro_batches=3), pl.shard(zero=1)]
    same("shard=2, stage=3", cut, build=build, data=Numbered, loss=F.mse_loss, epochs=1)


def test_layers_of_a_stage_may_be_cut() -> None:
    same("tensor=2, stage=2", [pipeline(LAYERS, micro_batches=4), TENSOR])


def test_all_axes_work_at_once() -> None:
    same(
        "data=2, tensor=2, stage=2",
        [TENSOR, pipeline(LAYERS, schedule="zero-bubble", micro_batches=3)],
        **SHORT,
    )
    same(
        "shard=2, tensor=2, stage=2",
        [pl.shard("blocks.*"), TENSOR, pipeline(LAYERS, micro_batches=4)],
        **SHORT,
    )


def test_a_user_names_the_layers_of_each_stage() -> None:
    def held(run: Run, model: nn.Module) -> list[str]:
        return sorted(name for name, parameter in model.named_parameters() if parameter.numel())

    first, second = same(
        "stage=2", pipeline(LAYERS, micro_batches=2, split=[3, 5]), build=untied, ended=held
    )
    assert all(name.startswith(("tokens", "positions", "blocks.0")) for name in first)
    assert second[-1].startswith("norm") and any(name.startswith("blocks.1") for name in second)


class Net(nn.Module):
    """Branches, a skip over all layers, a value that is None, and one that is a number, between
    the layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7)
        self.rest, self.unused = nn.Linear(7, 6), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        rows, first = x.shape[0], torch.tanh(self.first(x))
        left = self.left(first).relu_()
        right = self.right(left)
        return {"out": self.rest(left * right) + x * self.scale + rows * 0, "nothing": None}


def network() -> nn.Module:
    model = Net().double()
    del model.unused
    return fill(model)


def test_values_are_carried_over_stages() -> None:
    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        assert out["nothing"] is None
        return F.mse_loss(out["out"][:, : y.shape[1]], y)

    for schedule in ("1f1b", "zero-bubble"):
        cut = pipeline("first, left, right, rest", schedule=schedule, micro_batches=3)
        same("stage=4", cut, build=network, data=Numbered, loss=loss, clip=None)


def test_masks_and_dtypes_are_there_on_all_stages() -> None:
    same(
        "stage=2",
        pipeline("embed, blocks.*, head", micro_batches=2),
        build=lambda: fill(Masked(vocab=11).double()),
    )


def test_answers_values_and_checkpoints_are_of_the_same_tied_weights() -> None:
    """Rounded steps are made equal before anything looks at them, after the last step too."""

    def body(run: Run) -> list[torch.Tensor]:
        model = short()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pipeline(LAYERS, micro_batches=2),
        )
        tied = next(p for name, p in model.named_parameters() if name == "tokens.weight")

        def rounded() -> float:
            tied.data.add_(run.rank / 1000)  # as a codec of each stage's own would
            return 0.0

        with torch.no_grad():
            looks: list[Callable[[], Any]] = [
                lambda: run.forward(model, X),
                lambda: run.step(model, X, Y, loss=next_tokens),
                run.save,
            ]
            seen = [(rounded(), look(), tied.detach().clone())[2] for look in looks]
        rounded()
        return [*seen, tied.detach()]  # the last as the run leaves it

    first, second = workers(2, body, mesh="stage=2", strategy=AllReduce(codec=pl.int8()))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_int8_between_replicas_keeps_tied_weights_tied() -> None:
    def tied(run: Run, model: nn.Module) -> list[float]:
        cuts = run._prepared.cuts
        run._stepped._cuts.pipelines[0][1].level_ties()
        return [
            float(cuts.trained_tensor(parameter).detach().sum())
            for name, parameter in model.named_parameters()
            if name == "tokens.weight"
        ]

    found = workers(
        4,
        trained(pipeline(LAYERS, micro_batches=2), ended=tied),
        mesh="data=2, stage=2",
        strategy=AllReduce(codec=pl.int8()),
    )
    assert all(torch.equal(found[0][1], values) for _, values, _ in found)
    assert found[0][0][-1] < found[0][0][0]  # it learns


class Pairs(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(3)] * 8)


def misused(cut: Any, act: Any, size: int = 2, mesh: str = "stage=2") -> PacelineError:
    """The error of a run in which `act(run, model)` is done after the model was prepared, or of
    preparing it.
    """

    def body(run: Run) -> None:
        model = untied()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
        act(run, model)

    with pytest.raises(PacelineError) as caught:
        workers(size, body, mesh=mesh)
    return caught.value


def nothing(run: Run, model: nn.Module) -> None:
    """Do nothing."""


X, Y = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (
            pipeline("tokens, positions, blocks.*, norm, head", split=[1, 1]),
            r"split=\[1, 1\] doesn't deal 8 layers to 2 stages",
        ),
        (pipeline("tokens, blocks.*", trace=False), "no layer has the parameters positions.weight"),
        (
            pipeline(
                "tokens, positions, blocks, norm, head",
                schedule="interleaved",
                micro_batches=4,
                chunks=4,
            ),
            "8 stages .* for 5 layers",
        ),
        (
            pipeline(LAYERS, schedule="interleaved", micro_batches=1),
            "interleaved with micro_batches=1",
        ),
        (pipeline(LAYERS, schedule="gpip"), "schedule='gpip' is unknown; .*did you mean gpipe"),
        (pipeline(LAYERS, split="odd"), "split='odd'"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_pipeline_is_refused(cut: pipeline, words: str) -> None:
    error = misused(cut, nothing)
    assert isinstance(error, UsageError)
    assert re.search(words, str(error)), str(error)


def test_a_model_with_stages_elsewhere_cant_be_called() -> None:
    error = misused(pipeline(LAYERS), lambda run, model: model(X))
    assert "run.step(model, x, y, loss=F.cross_entropy)" in str(error)


def test_other_batches_on_two_stages_are_named() -> None:
    def act(run: Run, model: nn.Module) -> None:
        rows = 4 if run.rank == 0 else 3
        run.step(model, X[:rows], Y[:rows], loss=next_tokens)

    error = misused(pipeline(LAYERS), act)
    assert isinstance(error, DataError)
    assert "different rows (4 and 3)" in str(error)


def test_rows_that_differ_on_one_worker_are_told_to_all() -> None:
    def body(run: Run) -> str:
        model = untied()
        run.prepare(model, cut=pipeline(LAYERS))
        with pytest.raises(PacelineError) as caught:
            run.step(model, {"x": X, "more": Y[:3]} if run.rank == 1 else X, Y, loss=next_tokens)
        return str(caught.value)

    first, second = workers(2, body, mesh="stage=2")
    assert "3 and 4 rows" in second and "rank 1: " in first and "3 and 4 rows" in first


def test_a_loss_that_is_no_number_is_refused() -> None:
    error = misused(
        pipeline(LAYERS, micro_batches=1),
        lambda run, model: run.step(model, X, Y, loss=lambda out, y: out),
    )
    assert "has to be one number" in str(error) or "rank 1" in str(error)


def test_statistics_over_all_workers_are_refused() -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        run.prepare(model, cut=pipeline("auto"), batchnorm="sync")

    with pytest.raises(
        UsageError, match=r"batchnorm='sync' can't be used with layers on several workers"
    ):
        workers(2, body, mesh="stage=2")


def test_an_evaluation_goes_forward_alone() -> None:
    def body(run: Run) -> tuple[float, bool, torch.Tensor, torch.Tensor]:
        model, whole = gpt(), gpt()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pipeline(LAYERS, micro_batches=3),
        )
        tokens = torch.arange(20).view(4, 5) % 11
        with torch.no_grad():
            loss = run.step(model, tokens, tokens, loss=next_tokens)
        out = run.forward(model, tokens)
        reached = any(parameter.grad is not None for parameter in model.parameters())
        return (
            float(loss) - float(next_tokens(whole(tokens), tokens).detach()),
            reached,
            out,
            whole(tokens).detach(),
        )

    for difference, reached, out, wanted in workers(2, body, mesh="stage=2"):
        assert abs(difference) < 1e-12
        assert not reached
        assert torch.allclose(out, wanted, atol=1e-12, rtol=0)


def test_a_split_is_measured_and_the_same_on_all_workers() -> None:
    said: list[str] = []

    def held(run: Run) -> list[int]:
        model = nn.Sequential(
            *(
                nn.Linear(6, 300 if at == 2 else 6) if at != 3 else nn.Linear(300, 6)
                for at in range(8)
            )
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(
            model,
            optimizer,
            DataLoader(Numbered(), batch_size=8),
            cut=pipeline("auto", split="auto", micro_batches=2),
        )
        x = torch.ones(8, 6, dtype=torch.float64)
        run.step(model, x, x, loss=F.mse_loss)
        return list(run._prepared.cuts.pipelines[0][1].split.bounds)

    found = workers(4, held, mesh="data=2, stage=2", said=said)
    assert all(bounds == found[0] for bounds in found) and found[0][0] == 0 and found[0][-1] == 8
    assert any(
        f"the split that was measured, [{found[0][1]}, {8 - found[0][1]}]" in text for text in said
    )


def test_a_split_is_counted_for_a_model_without_memory() -> None:
    def held(run: Run) -> list[int]:
        with pl.meta():
            model = nn.Sequential(
                nn.Linear(6, 400), nn.Linear(400, 6), *(nn.Linear(6, 6) for _ in range(6))
            )
        run.prepare(
            model,
            DataLoader(Numbered(dtype=torch.float32), batch_size=8),
            cut=pipeline("auto", split="auto", micro_batches=2),
        )
        return list(run._prepared.cuts.pipelines[0][1].split.bounds)

    assert workers(2, held, mesh="stage=2") == [[0, 1, 8]] * 2


def test_a_loss_that_takes_long_is_counted() -> None:
    def over_many(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (
            (out @ out.new_ones(out.shape[1], 3000) @ out.new_ones(3000, y.shape[1]) - y)
            .square()
            .mean()
        )

    def held(run: Run, loss: Any) -> list[int]:
        with pl.meta():
            model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
        cut = pipeline("auto", split="auto", micro_batches=2, loss=loss)
        run.prepare(model, DataLoader(Numbered(dtype=torch.float32), batch_size=8), cut=cut)
        return list(run._prepared.cuts.pipelines[0][1].split.bounds)

    assert workers(2, lambda run: held(run, over_many), mesh="stage=2") == [[0, 7, 8]] * 2
    # the first has no gradient of its input
    assert workers(2, lambda run: held(run, None), mesh="stage=2") == [[0, 5, 8]] * 2


def test_a_loss_that_nothing_measures_is_refused() -> None:
    for given in ({"split": "even"}, {"split": [3, 5]}):
        with pytest.raises(
            UsageError, match=r"pipeline\(loss=...\) is .* which split='auto' measures"
        ):
            pipeline(LAYERS, loss=F.mse_loss, **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"layers\(loss=...\) is .* which split='auto' measures"):
        pl.layers(LAYERS, loss=F.mse_loss)

    def body(run: Run) -> None:
        cut = pipeline("auto", split="auto", loss=lambda out, y: out)
        run.prepare(
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double(),
            DataLoader(Numbered(), batch_size=8),
            cut=cut,
        )

    with pytest.raises(
        UsageError, match=r"pipeline: the loss is a tensor of shape .* has to be one number"
    ):
        workers(2, body, mesh="stage=2")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "give one to the same prepare"),
        (
            (DataLoader(Pairs(), batch_size=4),),
            r"gives \(inputs, target\), and this one gives a Tensor",
        ),
        ((DataLoader(Stream(), batch_size=4),), "a data set with indices"),
    ],
)
def test_a_split_that_cant_be_measured_is_refused(given: Any, words: str) -> None:
    def body(run: Run) -> None:
        run.prepare(untied(), *given, cut=pipeline(LAYERS, split="auto"))

    with pytest.raises(UsageError, match=words):
        workers(2, body, mesh="stage=2")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x) * (1.0 if scale is None else scale))
        return out


def test_arguments_with_a_default_may_come_from_the_batch() -> None:
    x, scale, y = (
        torch.randn(5, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
        for width in (6, 1, 2)
    )

    def body(run: Run) -> float:
        model = fill(Scaled().double())
        run.prepare(model, cut=pipeline("first, last", inputs=["x", "scale"], micro_batches=2))
        return float(run.step(model, x, y, scale=scale, loss=F.mse_loss))

    wanted = float(F.mse_loss(fill(Scaled().double())(x, scale), y).detach())
    assert all(abs(found - wanted) < 1e-12 for found in workers(2, body, mesh="stage=2"))


class Severed(nn.Module):
    """A weight of both ends, of which backward reaches the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).detach())
        return out


@pytest.mark.parametrize("held", [False, True])
def test_a_tied_weight_that_one_end_reaches_has_its_gradient_on_both(held: bool) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def graded() -> Severed:
        model = fill(Severed().double())
        if held:
            model.first.weight.grad = torch.ones(6, 6, dtype=torch.float64)
        return model

    def body(run: Run) -> Any:
        model = graded()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=pipeline("first, last", micro_batches=2),
        )
        for _ in range(2):  # the second pass adds to what the first has left
            run.step(model, x, x, loss=F.mse_loss)
        return model.first.weight.grad

    whole = graded()
    for _ in range(2):
        F.mse_loss(whole(x), x).backward()
    for found in workers(2, body, mesh="stage=2"):
        assert torch.allclose(found, whole.first.weight.grad, atol=1e-12, rtol=0)


def test_answers_have_the_rows_of_the_question() -> None:
    def body(run: Run) -> torch.Tensor:
        model = untied()
        run.prepare(model, cut=[pipeline(LAYERS, micro_batches=4), pl.shard("blocks.*")])
        out: torch.Tensor = run.forward(model, X[:1])
        return out

    wanted = untied()(X[:1]).detach()
    for found in workers(4, body, mesh="shard=2, stage=2"):
        assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-12, rtol=0)


def test_a_stage_that_changes_what_the_one_before_keeps_is_found_out() -> None:
    def body(run: Run) -> None:
        model = nn.Sequential(
            nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5, inplace=True), nn.Linear(6, 2)
        ).double()
        run.prepare(
            model, cut=pipeline("0, 1, 2, 3", schedule="interleaved", micro_batches=1, split=[2, 2])
        )
        x = torch.ones(4, 6, dtype=torch.float64)
        run.step(model, x, x[:, :2], loss=F.mse_loss)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        workers(1, body, mesh="stage=1")


def test_an_evaluation_counts_as_its_own_loader_says() -> None:
    def body(run: Run) -> list[float]:
        model = fill(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(Numbered(20), batch_size=7)
        model, optimizer, train = run.prepare(
            model, optimizer, loader, cut=pipeline("auto", micro_batches=3)
        )
        held_out = run.prepare(DataLoader(Numbered(20), batch_size=7), loss="sum", train=False)
        for x, y in train:
            run.step(model, x, y, loss=F.mse_loss)
        with torch.no_grad():
            return [
                float(
                    run.step(model, x, y, loss=lambda out, y: F.mse_loss(out, y, reduction="sum"))
                )
                for x, y in held_out
            ]

    whole = fill(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double())
    wanted = [
        float(F.mse_loss(whole(x), y, reduction="sum").detach())
        for x, y in DataLoader(Numbered(20), batch_size=7)
    ]
    for found in workers(2, body, mesh="stage=2"):
        assert found == pytest.approx(wanted, abs=1e-12)
