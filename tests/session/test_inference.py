"""The answers of models that are cut in any way are those of one process, on every worker."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.errors import DataError, UsageError
from paceline.session.run import Run
from tests.harness.runs import workers

CUT = pl.tensor(
    {"body.0": pl.column(), "body.2": pl.row(), "words": pl.vocab(), "head": pl.vocab()}
)
LAYOUTS: dict[str, tuple[int, str | None, list[Any]]] = {
    "replicas": (2, None, []),
    "tensor": (2, "tensor=2", [CUT]),
    "sharded": (2, "shard=2", [pl.shard("body", zero=3)]),
    "all": (8, "data=2, shard=2, tensor=2", [CUT, pl.shard("body", zero=3)]),
}


class Words(nn.Module):
    """Logits, and what they were made of, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Dropout(0.5))
        self.head = nn.Linear(6, 12)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        inner = self.body(self.words(x))
        return {"logits": self.head(inner) * scale, "inner": [inner], "nothing": None}


torch.manual_seed(4)
KNOWN = Words().double().eval()


def model() -> Words:
    return copy.deepcopy(KNOWN)  # threads would draw from one generator


def inputs(number: int) -> Tensor:
    return torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_workers_have_the_whole_answer(layout: str) -> None:
    size, mesh, cuts = LAYOUTS[layout]

    def body(run: Run) -> tuple[int, list[dict[str, Any]]]:
        made = run.prepare(model(), cut=cuts)
        mine = run.mesh.index_along(
            run.rank, ("data", "shard")
        )  # those along `tensor` have the same
        return mine, [run.forward(made, inputs(mine + turn), scale=2.0) for turn in range(3)]

    alone = model()
    for mine, found in workers(size, body, mesh=mesh):
        for turn, answer in enumerate(found):
            wanted = alone(inputs(mine + turn), scale=2.0)
            assert (
                type(answer["logits"]) is Tensor
                and not answer["logits"].requires_grad
                and answer["nothing"] is None
            )
            torch.testing.assert_close(
                answer["logits"], wanted["logits"].detach(), rtol=0, atol=1e-12
            )
            torch.testing.assert_close(
                answer["inner"][0], wanted["inner"][0].detach(), rtol=0, atol=1e-12
            )


def test_logits_in_a_dataclass_are_whole_too() -> None:
    @dataclass
    class Answer:
        logits: Tensor

    class Answering(Words):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
            return Answer(super().forward(x)["logits"])

    wanted = Answering().double().eval()
    for found in workers(
        2,
        lambda run: run.forward(run.prepare(copy.deepcopy(wanted), cut=[CUT]), inputs(0)),
        mesh="tensor",
    ):
        torch.testing.assert_close(
            found.logits, wanted(inputs(0)).logits.detach(), rtol=0, atol=1e-12
        )


def test_workers_of_a_replica_agree_to_the_bit() -> None:
    found = workers(
        2,
        lambda run: run.forward(run.prepare(model(), cut=[CUT]), inputs(0))["logits"],
        mesh="tensor",
    )
    assert torch.equal(*found)


def test_training_goes_on_after_an_answer() -> None:
    def body(run: Run) -> float:
        made = run.prepare(model(), cut=[CUT, pl.shard("body", zero=3)])
        run.forward(made, inputs(run.mesh.coordinates(run.rank)["shard"]))
        made(inputs(0))["logits"].sum().backward()
        return float(
            sum(
                parameter.grad.abs().sum()
                for parameter in made.parameters()
                if parameter.grad is not None
            )
        )

    assert all(found > 0 for found in workers(4, body, mesh="shard=2, tensor=2"))


def different(run: Run) -> None:
    run.forward(run.prepare(model(), cut=[CUT]), inputs(run.rank))


REFUSED: list[tuple[str, Callable[[Run], Any], type[Exception], str]] = [
    (
        "tensor",
        different,
        DataError,
        (
            r"the input of run.forward \(call 1\) is not the same on ranks 0 and 1, .*: "
            r"give both the same"
        ),
    ),
    (
        "tensor",
        lambda run: run.forward(run.prepare(model()), inputs(0)),
        UsageError,
        r"has the axis `tensor`, and no model is cut along it",
    ),
    (
        "data",
        lambda run: run.forward(inputs(0), inputs(0)),
        UsageError,
        r"run.forward got a Tensor; give the model first",
    ),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("mesh", "body", "kind", "why"), REFUSED, ids=["inputs", "axis", "model"])
def test_refused(mesh: str, body: Callable[[Run], Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        workers(2, body, mesh=mesh)
