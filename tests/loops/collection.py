"""What ordinary loops are made of: their data, their models, and the run that one plain process
has.

A loop is a function of a run. It prepares what it trains, trains it as plain PyTorch does, and
gives back whatever must be the same on any number of workers: models, optimizers, tensors, numbers,
lists and dicts of them. `loop` notes it under its name, with what is known of it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

# three batches of 6 and one of a single sample: two of three workers have a ghost there
COUNT, BATCH = 19, 6
PAIRED = 20  # a last batch of two, where torch's BatchNorm takes no single one
WIDTH, HIDDEN, OUT = 5, 8, 2

Body = Callable[[Any], Any]
Taken = Callable[[Any], list[tuple[str, Any]]]  # what of a loop's results has to be equal


class Loop(NamedTuple):
    """A loop, and what is known of it."""

    body: Body
    refused: str = ""  # it raises on several workers, in these words
    said: str = ""  # these words are said
    pending: str = ""  # why it isn't right yet
    near: float = 1e-9  # how far numbers may be apart, relative to their size
    counted: bool = True  # its steps are the turns of its training loaders, one after the other
    threads: str = ""  # why it needs processes


LOOPS: dict[str, Loop] = {}


def loop(body: Body | None = None, /, **known: Any) -> Any:
    """Note a loop."""
    if body is None:
        return lambda body: loop(body, **known)
    assert body.__name__ not in LOOPS, body.__name__
    LOOPS[body.__name__] = Loop(body, **known)
    return body


# ---- data and models; nothing here asks the process's random generator, which threads share


class Samples(Dataset[Any]):
    """Features and targets that differ with their number, in size too."""

    def __init__(self, count: int = COUNT, seed: int = 7) -> None:
        numbers = torch.Generator().manual_seed(seed)
        size = torch.linspace(0.4, 2.0, count, dtype=torch.float64)[:, None]
        self.x = torch.randn(count, WIDTH, generator=numbers, dtype=torch.float64) * size
        self.y = torch.randn(count, OUT, generator=numbers, dtype=torch.float64) + size

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Mapped(Dataset[Any]):
    """What `make(number, x, y)` gives for each sample."""

    def __init__(self, make: Callable[[int, Tensor, Tensor], Any], count: int = COUNT) -> None:
        self.samples, self.make = Samples(count), make

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.make(index, *self.samples[index])


def draws(seed: int = 3) -> torch.Generator:
    """A generator that is the same everywhere."""
    return torch.Generator().manual_seed(seed)


def batches(
    data: Dataset[Any] | None = None,
    batch: int | None = BATCH,
    *,
    shuffle: bool = True,
    **options: Any,
) -> DataLoader[Any]:
    """A loader over the samples."""
    order = {"shuffle": True, "generator": draws()} if shuffle else {}
    return DataLoader(data if data is not None else Samples(), batch_size=batch, **order, **options)


def filled(model: nn.Module, seed: int = 5, scale: float = 0.4) -> Any:
    """The model in float64, with parameters of its own seed."""
    model, numbers = model.double(), draws(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                torch.randn(p.shape, generator=numbers, dtype=torch.float64).to(p.dtype) * scale
            )
    return model


def net(out: int = OUT, seed: int = 5, middle: nn.Module | None = None) -> Any:
    """A small model, with another layer in its middle if there is one."""
    return filled(
        nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), middle or nn.Identity(), nn.Tanh(), nn.Linear(HIDDEN, out)
        ),
        seed,
    )


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> Optimizer:
    """What most loops here step with."""
    return SGD(model.parameters(), lr, momentum=momentum)


def parts(
    run: Any,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    *,
    count: int = COUNT,
    **options: Any,
) -> Any:
    """A model, its optimizer and a loader of `count` samples, prepared."""
    model = net() if model is None else model
    return run.prepare(model, optimizer(model), batches(Samples(count)), **options)


def mse(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean over all samples."""
    return F.mse_loss(model(x), y)


def train(
    run: Any,
    model: nn.Module,
    optimizer: Any,
    data: Any,
    epochs: int = 2,
    *,
    loss: Callable[..., Tensor] = mse,
) -> None:
    """The plainest of loops."""
    for _ in run.epochs(epochs):
        for x, y in data:
            optimizer.zero_grad()
            value = loss(model, x, y)
            value.backward()
            optimizer.step()
            run.log(loss=value)


# ---- one process


class Plain:
    """A run of nothing but PyTorch: what it prepares stays as it was.

    It counts turns of loaders, and keeps what is logged.
    """

    rank, size, local_rank, is_first, weight, seed = 0, 1, 0, True, 1.0, 1
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.steps_made = 0
        self.logged: defaultdict[int, dict[str, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.turning: Any = None  # the loader whose turns are the steps
        self._stopped = False

    def prepare(self, *objects: Any, train: bool | None = None, **_: Any) -> Any:
        """The objects; loaders count."""
        for thing in objects:
            if isinstance(thing, DataLoader):
                watched(thing, self, train)
        return objects if len(objects) != 1 else objects[0]

    def epochs(self, count: int) -> Iterator[int]:
        """0, 1, ..."""
        for epoch in range(count):
            if not self._stopped:
                yield epoch

    def log(self, **values: Any) -> None:
        """Keep them."""
        for name, value in values.items():
            self.logged[self.steps_made + (self.turning is not None)][name].append(
                float(value.detach() if isinstance(value, Tensor) else value)
            )

    def means(self) -> dict[int, dict[str, float]]:
        """What was logged, by step."""
        return {
            step: {name: sum(found) / len(found) for name, found in values.items()}
            for step, values in self.logged.items()
        }

    def mean(self, x: Any, weight: float | None = None) -> Any:
        """The same."""
        return x.detach() if isinstance(x, Tensor) else x

    def gather(self, x: Tensor) -> Tensor:
        """The same."""
        return x.detach()

    def clip(self, what: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch does."""
        return nn.utils.clip_grad_norm_(
            what.parameters() if isinstance(what, nn.Module) else what, max_norm, norm_type
        )

    def no_sync(self) -> Any:
        """Nothing."""
        return contextlib.nullcontext()

    first = no_sync

    def stop(self) -> None:
        """Soon."""
        self._stopped = True

    def nothing(self, *_: Any, **__: Any) -> None:
        """What one process needn't do."""

    print = barrier = save = keep = nothing


def watched(loader: DataLoader[Any], run: Plain, train: bool | None) -> None:
    """Have a loader count its turns, where they are of training and no other's are."""
    own = type(loader)

    class Watched(own):  # type: ignore[misc,valid-type]
        def __iter__(self) -> Iterator[Any]:
            return turns(
                super().__iter__(), run, torch.is_grad_enabled() if train is None else train
            )

    loader.__class__ = Watched


def turns(batches: Iterator[Any], run: Plain, training: bool) -> Iterator[Any]:
    """The batches; a step is over when the next is asked for, or the loop is left."""
    me = object()
    for batch in batches:
        if training and run.turning is None:
            run.turning = me
        try:
            yield batch
        finally:
            if run.turning is me:
                run.turning = None
                run.steps_made += 1


# ---- what came out of it


def flat(found: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text in it, with its place."""
    if isinstance(found, nn.Module | Optimizer) or (
        hasattr(found, "state_dict") and not isinstance(found, Tensor)
    ):
        yield from flat(found.state_dict(), f"{at}{type(found).__name__}")
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from flat(value, f"{at}.{key}")
    elif isinstance(found, list | tuple):
        for number, value in enumerate(found):
            yield from flat(value, f"{at}[{number}]")
    elif isinstance(found, Tensor):
        yield at, found.detach().clone()
    elif isinstance(found, bool | int | float | str | None):
        yield at, found


def everything(found: Any) -> list[tuple[str, Any]]:
    """All that must be equal."""
    return list(flat(found))


def plain(known: Loop, taken: Taken = everything) -> tuple[list[tuple[str, Any]], Plain]:
    """What comes of it in one process without paceline."""
    run = Plain()
    return taken(known.body(run)), run


def differences(
    found: Sequence[tuple[str, Any]], wanted: Sequence[tuple[str, Any]], near: float
) -> list[str]:
    """Where the two differ."""
    if [at for at, _ in found] != [at for at, _ in wanted]:
        return [f"other things: {sorted({at for at, _ in found} ^ {at for at, _ in wanted})}"]
    return [
        f"{at}: {mine} for {theirs}"
        for (at, mine), (_, theirs) in zip(found, wanted, strict=True)
        if not same(mine, theirs, near)
    ]


def same(mine: Any, theirs: Any, near: float) -> bool:
    """Whether they are equal, numbers as nearly as `near` says."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return False
        if not (mine.is_floating_point() or mine.is_complex()):
            return torch.equal(mine, theirs)
        wide = torch.complex128 if mine.is_complex() else torch.float64
        mine, theirs = mine.to_dense().to(wide), theirs.to_dense().to(wide)
        return torch.allclose(mine, theirs, rtol=near, atol=near, equal_nan=True)
    if isinstance(mine, float) and isinstance(theirs, float):
        return same(
            torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64), near
        )
    return bool(mine == theirs)
