"""Weights that a model begins with, from a file or a dict: each worker reads its part alone.

out.safetensors            only the rectangles that this worker holds are read
model.pt                   written by torch.save, and mapped into memory: unused parts are never
                           read, and nothing but tensors is unpickled
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
from paceline.formatting import suggest_nearest
from paceline.parallel.initialise import give_memory
from paceline.parallel.meta import CPU
from paceline.parallel.placement import Placements, Range, Rectangle, local_part
from paceline.state.checksum import compute_checksums
from paceline.state.versioned import MAX_SHOWN_DIFFERENCES

# Characters of another library's error message.
LONGEST_REASON = 200
# A digest reads `PAGES` pages of each large tensor in a file, and all bytes of smaller ones.
PAGE, PAGES = 4096, 9  # bytes of a page, number of pages
Source = str | Path | Mapping[str, Tensor]


@dataclass(frozen=True)
class Weights:
    """Logical tensors that can be read in parts.

    `read` takes a name and a rectangle of that tensor.

    `digest` is equal on workers that are given the same, and differs for other values. Of a dict,
    all bytes count. A file isn't read as a whole: of small tensors all bytes count, and of each
    larger one `PAGES` pages, the first and the last among them. A file of torch.save also has
    checksums of all its content, which count as well.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Rectangle], Tensor]
    digest: str


@contextlib.contextmanager
def open_weights(source: Source) -> Iterator[Weights]:
    """Open a file of weights, or a state dict. Raises `UsageError` for anything else."""
    if isinstance(source, Mapping):
        yield _open_dict("the dict", source)
        return
    path = Path(source)
    if not path.is_file():
        raise UsageError(
            f"there is no file {path} with weights; give a file of "
            "safetensors or torch.save, or a state dict"
        )
    with contextlib.ExitStack() as files:
        try:
            weights = (
                _open_safetensors(path, files)
                if path.suffix == ".safetensors"
                else _open_torch(path)
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


def load_weights(
    model: nn.Module,
    weights: Weights,
    placements: Placements,
    *,
    prefix: str = "",
    device: torch.device = CPU,
) -> None:
    """Give a model these weights, each worker its part.

    One name of a tied parameter is enough.

    Args:
        model: Model to change in place, cut or not.
        weights: Weights by the names in the model.
        placements: Which part of each parameter this worker holds.
        prefix: Prefix of the model's names in `placements`. Default: none.
        device: Where parameters without memory get their memory. Default: the CPU.

    Raises:
        UsageError: Names or shapes are not those of the model; nothing is changed then. Or the file
            turns out to be unreadable.
    """
    targets = dict(_find_targets(model))
    _check_names(targets, weights, placements, prefix)
    done = set[int]()
    with torch.no_grad():
        for name, target in targets.items():
            if name not in weights.shapes or id(target) in done:
                continue
            done.add(id(target))
            placement = placements.placement_of(target, prefix + name)
            give_memory(target, placement, device)
            part = local_part(target)
            for region in placement.regions:
                region.view_local(part).copy_(
                    _read_part(weights, name, region.logical).view(region.shape)
                )


def _read_part(weights: Weights, name: str, box: Rectangle) -> Tensor:
    try:
        return weights.read(name, box)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(
            f"{name} can't be read from {weights.name}: "
            f"{' '.join(str(error).split())[:LONGEST_REASON]}"
        ) from error


def _find_targets(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model's state dict has, as they lie in the model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _check_names(
    targets: Mapping[str, Tensor], weights: Weights, placements: Placements, prefix: str
) -> None:
    shapes = {
        name: tuple(placements.placement_of(target, prefix + name).shape)
        for name, target in targets.items()
    }
    # Parameters that are found under one of their names; the other names of tied ones may be
    # missing.
    loaded = {id(target) for name, target in targets.items() if name in weights.shapes}
    lines = [
        f"{name} {list(shape)} is not in it{suggest_nearest(name, weights.shapes)}"
        for name, shape in shapes.items()
        if name not in weights.shapes and id(targets[name]) not in loaded
    ]
    lines += [
        f"{name} is not in the model{suggest_nearest(name, shapes)}"
        for name in weights.shapes
        if name not in shapes
    ]
    lines += [
        f"{name} is {list(weights.shapes[name])} in it, {list(shape)} in the model"
        for name, shape in shapes.items()
        if name in weights.shapes and weights.shapes[name] != shape
    ]
    if lines:
        more = (
            f" and {len(lines) - MAX_SHOWN_DIFFERENCES} more"
            if len(lines) > MAX_SHOWN_DIFFERENCES
            else ""
        )
        raise UsageError(
            f"{weights.name} has weights of another model: "
            f"{'; '.join(lines[:MAX_SHOWN_DIFFERENCES])}{more}"
        )


def _open_safetensors(path: Path, files: contextlib.ExitStack) -> Weights:
    file = files.enter_context(safetensors.safe_open(path, "pt"))
    # `safe_open` is no dict, and can't be iterated.
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    return Weights(
        path.name,
        shapes,
        lambda name, box: slices[name][_slices_of(box)],
        _digest_safetensors(path),
    )


def _digest_safetensors(path: Path) -> str:
    """Hash the header, with all names, dtypes and shapes, and pages of each tensor."""
    # The format: 8 bytes with the length of the header, the header in JSON, and the tensors' bytes,
    # at offsets from the header's end.
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        begin, pages = file.tell(), hashlib.sha256()
        for first, last in sorted(tuple(entry["data_offsets"]) for entry in entries):
            for start, stop in _choose_pages(last - first):
                file.seek(begin + first + start)
                pages.update(file.read(stop - start))
    return _hash_facts(header, pages.digest())


def _open_torch(path: Path) -> Weights:
    state = _check_state(
        path.name, torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    )
    # torch.save writes a zip archive. Its members' names begin with the name that the file had
    # then.
    with zipfile.ZipFile(path) as archive:
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
        for start, stop in _choose_pages(len(memory)):
            pages.update(memory[start:stop].numpy().tobytes())
    return _make_weights(path.name, state, stored, pages.digest())


def _choose_pages(size: int) -> list[Range]:
    """List the ranges of a tensor's bytes that a digest looks at: all of them, or spread pages."""
    if size <= PAGE * PAGES:
        return [(0, size)]
    return [
        (start, start + PAGE)
        for start in (page * (size - PAGE) // (PAGES - 1) for page in range(PAGES))
    ]


def _open_dict(name: str, state_dict: object) -> Weights:
    state = _check_state(name, state_dict)
    return _make_weights(
        name, state, compute_checksums([value.detach() for value in state.values()])
    )


def _check_state(name: str, state: object) -> Mapping[str, Tensor]:
    """Return a value that is a state dict. Raises `UsageError` for anything else."""
    if not isinstance(state, Mapping):
        raise UsageError(
            f"{name} has a {type(state).__qualname__}, and not a state dict; give a dict of "
            "tensors by name"
        )
    odd = next((key for key, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise UsageError(
            f"{name}: {odd!r} is a {type(state[odd]).__qualname__}, and a state dict has tensors "
            "only; give the part of it that has them"
        )
    return state


def _make_weights(name: str, state: Mapping[str, Tensor], *content: object) -> Weights:
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    dtypes = [value.dtype for value in state.values()]
    return Weights(
        name,
        shapes,
        lambda key, box: state[key].detach()[_slices_of(box)],
        _hash_facts(shapes, dtypes, *content),
    )


def _slices_of(box: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _hash_facts(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
