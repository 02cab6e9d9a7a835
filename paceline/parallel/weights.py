"""Weights that a model begins with, from a file or a dict: each worker reads its part of them alone.

out.safetensors            only the rectangles that this worker holds are read
model.pt                   of torch.save, mapped into memory: what isn't used is never read, and nothing is unpickled but tensors
{"up.weight": tensor}      a plain state dict, the same on all workers
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.initialise import give_memory
from paceline.parallel.placement import Placements, Rectangle, local
from paceline.state.checksum import checksums
from paceline.state.versioned import SHOWN

LONGEST_REASON = 200  # letters of an error that is not ours
Source = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """Logical tensors that can be read in parts. `digest`: equal on workers that are given the same."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Rectangle], Tensor]
    digest: str


@contextlib.contextmanager
def opened(source: Source) -> Iterator[Weights]:
    """Open a file of weights, or look at a dict. Raises `UsageError` for what is neither."""
    if isinstance(source, Mapping):
        yield _of_dict("the dict", source)
        return
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"there is no file {path} with weights; give one of safetensors or of torch.save, or a state dict")
    with contextlib.ExitStack() as files:
        try:
            weights = _of_safetensors(path, files) if path.suffix == ".safetensors" else _of_torch(path)
        except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
            raise UsageError(f"{path} can't be read as weights: {' '.join(str(error).split())[:LONGEST_REASON]}") from error
        yield weights


def load(model: nn.Module, weights: Weights, placements: Placements, *, prefix: str = "") -> None:
    """Give a model these weights, each worker its part; parameters without memory get it.

    Raises `UsageError` before anything is changed where names or shapes are not those of the model. One name of a tied parameter is enough.
    """
    targets = dict(_targets(model))
    _compare(targets, weights, placements, prefix)
    done = set[int]()
    with torch.no_grad():
        for name, target in targets.items():
            if name not in weights.shapes or id(target) in done:
                continue
            done.add(id(target))
            placement = placements.of(target, prefix + name)
            give_memory(target, placement)
            mine = local(target)
            for region in placement.regions:
                region.of_local(mine).copy_(weights.read(name, region.logical).view(region.shape))


def _targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model's state dict has, as it lies in the model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _compare(targets: Mapping[str, Tensor], weights: Weights, placements: Placements, prefix: str) -> None:
    shapes = {name: tuple(placements.of(target, prefix + name).shape) for name, target in targets.items()}
    there = {id(target) for name, target in targets.items() if name in weights.shapes}
    lines = [
        f"{name} {list(shape)} is not in it{_near(name, weights.shapes)}"
        for name, shape in shapes.items()
        if name not in weights.shapes and id(targets[name]) not in there
    ]
    lines += [f"{name} is not in the model{_near(name, shapes)}" for name in weights.shapes if name not in shapes]
    lines += [
        f"{name} is {list(weights.shapes[name])} in it, {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in weights.shapes and weights.shapes[name] != shape
    ]
    if lines:
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UsageError(f"{weights.name} has weights of another model: {'; '.join(lines[:SHOWN])}{more}")


def _near(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (the nearest is {near[0]})" if near else ""


def _of_safetensors(path: Path, files: contextlib.ExitStack) -> Weights:
    file = files.enter_context(safetensors.safe_open(path, "pt"))
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
    return Weights(path.name, shapes, lambda name, box: slices[name][_index(box)], _digest(shapes, path.stat().st_size))


def _of_torch(path: Path) -> Weights:
    return _of_dict(path.name, torch.load(path, map_location="cpu", mmap=True, weights_only=True))


def _of_dict(name: str, state: object) -> Weights:
    if not isinstance(state, Mapping):
        raise UsageError(f"{name} has a {type(state).__qualname__}, and no state dict")
    odd = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise UsageError(
            f"{name}: {odd!r} is a {type(state[odd]).__qualname__}, and a state dict has tensors; give the part of it that has"
        )
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    sums = checksums([value.detach() for value in state.values()])
    return Weights(name, shapes, lambda key, box: state[key].detach()[_index(box)], _digest("", shapes, sums))


def _index(box: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
