"""Weights that a model begins with, from a file or a dict: each worker reads its part of them
alone.

out.safetensors            only the rectangles that this worker holds are read
model.pt                   of torch.save, mapped into memory: what isn't used is never read, and
                           nothing is unpickled but tensors
{"up.weight": tensor}      a plain state dict, the same on all workers
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.formatting import nearest
from paceline.parallel.initialise import give_memory
from paceline.parallel.meta import CPU
from paceline.parallel.placement import Placements, Range, Rectangle, local
from paceline.state.checksum import checksums
from paceline.state.versioned import SHOWN

LONGEST_REASON = 200  # letters of an error that is not ours
# bytes of a page; pages of each large tensor in a file that its digest looks at
PAGE, PAGES = 4096, 9
Source = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """Logical tensors that can be read in parts.

    `digest`: equal on workers that are given the same, and another one for other values. Of a dict,
    all bytes count. Of a file, which is not read as a whole, all bytes of small tensors do, and
    `PAGES` pages of each larger one, the first and the last among them. A file of torch.save has
    checksums of all that is in it, which count as well.
    """

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
        raise UsageError(
            f"there is no file {path} with weights; give one of safetensors or of torch.save, or a "
            "state dict"
        )
    with contextlib.ExitStack() as files:
        try:
            weights = (
                _of_safetensors(path, files) if path.suffix == ".safetensors" else _of_torch(path)
            )
        except (
            OSError,
            RuntimeError,
            pickle.UnpicklingError,
            safetensors.SafetensorError,
        ) as error:
            raise UsageError(
                f"{path} can't be read as weights: {' '.join(str(error).split())[:LONGEST_REASON]}"
            ) from error
        yield weights


def load(
    model: nn.Module,
    weights: Weights,
    placements: Placements,
    *,
    prefix: str = "",
    device: torch.device = CPU,
) -> None:
    """Give a model these weights, each worker its part; parameters without memory get it on
    `device`.

    Raises `UsageError` before anything is changed where names or shapes are not those of the model,
    and for a file that can't be read after all. One name of a tied parameter is enough.
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
            give_memory(target, placement, device)
            mine = local(target)
            for region in placement.regions:
                region.of_local(mine).copy_(_part(weights, name, region.logical).view(region.shape))


def _part(weights: Weights, name: str, box: Rectangle) -> Tensor:
    try:
        return weights.read(name, box)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"{name} can't be read from {weights.name}: "
            f"{' '.join(str(error).split())[:LONGEST_REASON]}"
        ) from error


def _targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a model's state dict has, as it lies in the model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _compare(
    targets: Mapping[str, Tensor], weights: Weights, placements: Placements, prefix: str
) -> None:
    shapes = {
        name: tuple(placements.of(target, prefix + name).shape) for name, target in targets.items()
    }
    there = {id(target) for name, target in targets.items() if name in weights.shapes}
    lines = [
        f"{name} {list(shape)} is not in it{nearest(name, weights.shapes)}"
        for name, shape in shapes.items()
        if name not in weights.shapes and id(targets[name]) not in there
    ]
    lines += [
        f"{name} is not in the model{nearest(name, shapes)}"
        for name in weights.shapes
        if name not in shapes
    ]
    lines += [
        f"{name} is {list(weights.shapes[name])} in it, {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in weights.shapes and weights.shapes[name] != shape
    ]
    if lines:
        more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UsageError(
            f"{weights.name} has weights of another model: {'; '.join(lines[:SHOWN])}{more}"
        )


def _of_safetensors(path: Path, files: contextlib.ExitStack) -> Weights:
    file = files.enter_context(safetensors.safe_open(path, "pt"))
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
    return Weights(
        path.name, shapes, lambda name, box: slices[name][_index(box)], _digest_of_safetensors(path)
    )


def _digest_of_safetensors(path: Path) -> str:
    """Compute the digest of the header, which has names, dtypes and shapes, and of pages of each
    tensor.
    """
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        begin, pages = file.tell(), hashlib.sha256()
        for first, last in sorted(tuple(entry["data_offsets"]) for entry in entries):
            for start, stop in _pages(last - first):
                file.seek(begin + first + start)
                pages.update(file.read(stop - start))
    return _digest(header, pages.digest())


def _of_torch(path: Path) -> Weights:
    state = _checked(path.name, torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    with zipfile.ZipFile(path) as archive:  # whose names begin with that of the file
        members = (
            (info.filename.partition("/")[2], info.CRC, info.file_size)
            for info in archive.infolist()
        )
        stored = sorted(
            member for member in members if member[0] == "data.pkl" or member[0].startswith("data/")
        )
    pages = hashlib.sha256()
    for value in state.values():
        memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        for start, stop in _pages(len(memory)):
            pages.update(memory[start:stop].numpy().tobytes())
    return _of_state(path.name, state, stored, pages.digest())


def _pages(size: int) -> list[Range]:
    """Return the ranges of so many bytes that a digest looks at: all of them, or pages from the
    first to the last.
    """
    if size <= PAGE * PAGES:
        return [(0, size)]
    return [
        (start, start + PAGE)
        for start in (page * (size - PAGE) // (PAGES - 1) for page in range(PAGES))
    ]


def _of_dict(name: str, found: object) -> Weights:
    state = _checked(name, found)
    return _of_state(name, state, checksums([value.detach() for value in state.values()]))


def _checked(name: str, state: object) -> Mapping[str, Tensor]:
    """Return a state dict as one. Raises `UsageError` for anything else."""
    if not isinstance(state, Mapping):
        raise UsageError(f"{name} has a {type(state).__qualname__}, and no state dict")
    odd = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise UsageError(
            f"{name}: {odd!r} is a {type(state[odd]).__qualname__}, and a state dict has tensors; "
            "give the part of it that has"
        )
    return state


def _of_state(name: str, state: Mapping[str, Tensor], *content: object) -> Weights:
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    dtypes = [value.dtype for value in state.values()]
    return Weights(
        name,
        shapes,
        lambda key, box: state[key].detach()[_index(box)],
        _digest(shapes, dtypes, *content),
    )


def _index(box: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
