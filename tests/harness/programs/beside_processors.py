"""Trains a small model in many ways on processors, and then on the devices that workers have, and
writes how far apart they end.

beside_processors.py GROUP OUT.json   GROUP: of `GROUPS`; leaves {way: what came of it} of the first
                                      worker
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape, next_token_loss

STEPS, ROWS, SAVED = 9, 8, 5  # SAVED: steps before a checkpoint, where one is asked for
LAYERS = "tokens, positions, blocks.*, norm, head"
SHAPE = GPTShape(d=32, layers=4, heads=2, context=16, vocab=50)


@dataclass(frozen=True)
class Way:
    """One way to train. `near`: how far apart weights may end, relative to all of them."""

    sync: str = "AllReduce()"
    near: float = 1e-9
    mesh: str | None = None
    cut: tuple[Any, ...] = ()
    kind: str = "gpt"
    optimizer: str = "SGD"
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None  # on processors bfloat16 in the place of float16
    prepared: dict[str, Any] = field(default_factory=dict)  # more arguments of `run.prepare`
    clip: float | None = None
    meta: bool = False  # built under pl.meta()
    compiled: bool = False  # on devices
    saved: bool = False  # once more, from a checkpoint
    dealt: str = ""  # the split of layers over devices of each worker

    @property
    def stepped(self) -> bool:
        """Whether the loop has to be that of `run.step`."""
        return self.mesh is not None and "stage" in self.mesh


ROUGH = {"near": 3e-2, "dtype": torch.float32}
CODECS = {
    "half()": 1e-3,
    "bfloat16()": 1e-2,
    "int8(block=64)": 2e-3,
    "int8(block=64, rounding='stochastic')": 2e-2,
    "int4(block=32)": 3e-2,
    "error_feedback(sign(block=64))": 3e-2,
    "gathered(sign())": 3e-2,
    "error_feedback(topk(0.05))": 2e-2,
    "error_feedback(randomk(0.2))": 2e-2,
    "error_feedback(compose(topk(0.1), int8(block=16)))": 2e-2,
    "error_feedback(powersgd(2))": 1e-2,
    "error_feedback(powersgd(2, inner=int8(block=16)))": 2e-2,
    "where(smaller(100), exact(), error_feedback(topk(0.1)))": 2e-2,
    "error_feedback(after(5, topk(0.1), before=half()))": 2e-2,
    "'auto'": 1e-2,
}
ROUTES = ("auto", "native", "direct", "ring", "tree", "halving-doubling", "hierarchical")
SHARD, TENSOR = (pl.shard("blocks.*", zero=3),), (pl.tensor("auto"),)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")

GROUPS: dict[str, dict[str, Way]] = {
    "routes": {via: Way(f"AllReduce(via={via!r})") for via in ROUTES},
    "codecs": {codec: Way(f"AllReduce(codec={codec})", near) for codec, near in CODECS.items()},
    "apart": {
        "each step": Way("LocalSGD(every=1)"),
        "local": Way("LocalSGD(every=4)"),
        "outer": Way("LocalSGD(every=4, outer=nesterov(0.7, 0.9), codec=int8(block=64))", 1e-2),
        "streaming": Way("LocalSGD(every=4, fragments=2, delay=1, alpha=0.5)"),
        "adaptive": Way("LocalSGD(adaptive(4))", 1e-3),
        "ring": Way("Gossip(graph='ring')"),
        "exponential": Way("Gossip(graph='exponential', codec=int8(block=64))", 1e-2),
        "sequence": Way("Sequence((AllReduce(), 'local'), (LocalSGD(4), 'host'))"),
    },
    "loops": {
        "shares": Way(prepared={"shares": [1, 3]}),
        "shares by speed": Way(prepared={"shares": "auto"}),
        "clipped": Way(clip=0.5),
        "Adam, saved": Way(optimizer="Adam", saved=True),
        "BatchNorm": Way(kind="normed"),
        "sparse table": Way(kind="table", near=1e-4, dtype=torch.float32, optimizer="Adagrad"),
        "float32": Way(near=1e-4, dtype=torch.float32),
        "bfloat16": Way(autocast=torch.bfloat16, **ROUGH),
        "float16": Way(autocast=torch.float16, **ROUGH),
        "float16, half": Way("AllReduce(codec=half())", autocast=torch.float16, **ROUGH),
        "float16, clipped": Way(autocast=torch.float16, clip=0.5, **ROUGH),
        "compiled": Way(compiled=True, near=1e-4, dtype=torch.float32),
    },
    "tensor": {
        "plain": Way(mesh="tensor", cut=TENSOR),
        "clipped": Way(mesh="tensor", cut=TENSOR, clip=0.5, optimizer="Adam"),
        "without memory": Way(mesh="tensor", cut=TENSOR, meta=True),
        "float16": Way(mesh="tensor", cut=TENSOR, autocast=torch.float16, **ROUGH),
        "saved": Way(mesh="tensor", cut=TENSOR, optimizer="Adam", saved=True),
    },
    "shard": {
        **{
            f"zero={zero}": Way(
                mesh="shard", cut=(pl.shard("blocks.*", zero=zero),), optimizer="Adam"
            )
            for zero in (1, 2, 3)
        },
        **{
            f"without memory, zero={zero}": Way(
                mesh="shard", cut=(pl.shard("blocks.*", zero=zero),), optimizer="Adam", meta=True
            )
            for zero in (1, 3)
        },
        "clipped": Way(mesh="shard", cut=SHARD, clip=0.5),
        "float16": Way(mesh="shard", cut=SHARD, autocast=torch.float16, **ROUGH),
        "in bfloat16": Way(
            mesh="shard",
            cut=(pl.shard("blocks.*", zero=3, params="bfloat16"),),
            near=5e-2,
            dtype=torch.float32,
        ),
        "saved": Way(mesh="shard", cut=SHARD, optimizer="Adam", saved=True),
    },
    "stage": {
        **{
            name: Way(mesh="stage", cut=(pl.pipeline(LAYERS, schedule=name, micro_batches=4),))
            for name in SCHEDULES
        },
        "measured": Way(mesh="stage", cut=(pl.pipeline(LAYERS, micro_batches=4, split="auto"),)),
        "traced, saved": Way(
            mesh="stage", cut=(pl.pipeline("auto", micro_batches=4),), optimizer="Adam", saved=True
        ),
        "without memory": Way(mesh="stage", cut=(pl.pipeline(LAYERS, micro_batches=4),), meta=True),
        "float16": Way(
            mesh="stage",
            cut=(pl.pipeline(LAYERS, micro_batches=4),),
            autocast=torch.float16,
            **ROUGH,
        ),
        "layers": Way(mesh="stage", cut=(pl.layers(LAYERS),)),
    },
    "devices": {
        "even": Way(dealt="even"),
        "measured": Way(dealt="auto"),
        "without memory": Way(dealt="even", meta=True),
    },
    "four": {
        "data, shard": Way(mesh="data=2, shard=2", cut=SHARD),
        "data, tensor": Way(mesh="data=2, tensor=2", cut=TENSOR),
        "tensor, shard": Way(mesh="tensor=2, shard=2", cut=(*TENSOR, *SHARD)),
        "tensor, stage": Way(
            mesh="tensor=2, stage=2",
            cut=(*TENSOR, pl.pipeline(LAYERS, schedule="zero-bubble", micro_batches=4)),
        ),
    },
}


class Table(nn.Module):
    """A sparse table, whose rows lie on servers, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = pl.SparseEmbedding(50, 8, seed=1), nn.Linear(8, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).unsqueeze(1)


class Normed(nn.Module):
    """Layers with statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Embedding(50, 16),
            nn.Flatten(),
            nn.Linear(256, 32),
            nn.BatchNorm1d(32),
            nn.Tanh(),
            nn.Linear(32, 50),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).unsqueeze(1)


def parts(way: Way) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model, an optimizer and a loader of rows of tokens; of all but a GPT the last token
    alone is asked for.
    """
    torch.manual_seed(0)
    with pl.meta() if way.meta else nullcontext():
        model = {"gpt": lambda: GPT(SHAPE), "table": Table, "normed": Normed}[way.kind]().to(
            way.dtype
        )
    tokens = torch.randint(0, 50, (STEPS * ROWS, 17), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :16], tokens[:, 1:] if way.kind == "gpt" else tokens[:, 16:])
    loader: DataLoader[Any] = DataLoader(
        data, ROWS, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    return model, getattr(torch.optim, way.optimizer)(model.parameters(), 0.01), loader


def cast(way: Way, kind: str) -> AbstractContextManager[Any]:
    if way.autocast is None:
        return nullcontext()
    return torch.autocast(kind, dtype=way.autocast if kind == "cuda" else torch.bfloat16)


def train(
    way: Way, device: str | None, name: str, *, stop: int | None = None, resume: bool = False
) -> tuple[list[float], Tensor]:
    """The losses of all steps, or of the first `stop`, and the weights in the checkpoint after
    them.
    """
    model, optimizer, loader = parts(way)
    losses, path = [], Path()
    with pl.start(way.sync, name=name, seed=1, device=device, mesh=way.mesh) as run:
        kind = run.device.type
        there = "cuda:0" if kind == "cuda" else "cpu"
        cut = (
            (pl.layers(LAYERS, devices=[there, "cpu"], split=way.dealt),) if way.dealt else way.cut
        )
        model, optimizer, loader = run.prepare(
            model, optimizer, loader, **way.prepared, **({"cut": cut} if cut else {})
        )
        called = torch.compile(model) if way.compiled and kind == "cuda" else model
        half = way.autocast == torch.float16 and kind == "cuda"
        scaler = run.prepare(torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=half))
        if resume:
            assert run.resume()
        for x, y in loader:
            assert x.device.type == kind
            with cast(way, kind):
                loss = (
                    run.step(called, x, y, loss=next_token_loss)
                    if way.stepped
                    else next_token_loss(called(x), y)
                )
            if not way.stepped:
                scaler.scale(loss).backward()
            if way.clip is not None:
                scaler.unscale_(optimizer)
                run.clip(model, way.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.log(loss=loss)
            losses.append(float(run.mean(loss.detach())))
            if run.steps + 1 == (stop or STEPS):
                path = run.save()
                break
        run.barrier()
    state = pl.state_dict(path)
    return losses, torch.cat(
        [value.double().flatten() for value in state.values() if value.is_floating_point()]
    )


def compare(way: Way, name: str) -> dict[str, float]:
    """How far losses and weights are from those of processors, and those of a run that is
    resumed from those of one that isn't.
    """
    wanted, found = train(way, "cpu", f"{name}-processors"), train(way, None, f"{name}-devices")
    apart = {
        "near": way.near,
        "losses": max(abs(a - b) for a, b in zip(wanted[0], found[0], strict=True)),
        "weights": float((found[1] - wanted[1]).norm() / wanted[1].norm()),
    }
    if way.saved:
        same = replace(way, saved=False)
        before = train(same, None, f"{name}-saved", stop=SAVED)
        after = train(same, None, f"{name}-saved", resume=True)
        assert before[0] + after[0] == found[0], (
            f"{before[0]} and then {after[0]} are not {found[0]}"
        )
        apart["resumed"] = float((after[1] - found[1]).norm())
    return apart


def main() -> None:
    group, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    found = {
        name: compare(way, f"{group}-{number}")
        for number, (name, way) in enumerate(GROUPS[group].items())
    }
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
