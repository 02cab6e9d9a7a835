"""Snapshots: any nested state becomes a map of tensors and a tree of JSON, and comes back exactly.

Plain JSON stands for itself. Everything else is an object with the key "$" that says what it is:

    {"$": "tensor", "path": "model/weight", "stride": [1, 2]}     {"$": "float", "value": "nan"}
    {"$": "dict", "items": [[0, ...], ...]}                       {"$": "tuple", "items": [...]}
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.state.checksum import flat

Json = Any  # what json.dumps takes: dict, list, str, int, finite float, bool, None

DTYPES: Final[dict[str, torch.dtype]] = {  # by the name that they are written as
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}
WORD: Final = 8  # bytes
# in the metadata of a module: which parts of its parameters a worker has, which isn't kept
MARK: Final = "paceline.parts"
_RESERVED: Final = "__metadata__"  # a name that safetensors keeps for itself
SAFE: Final = frozenset(
    {
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    }
)
_SEQUENCES: Final[dict[type, str]] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_REBUILD: Final[dict[str, Callable[[Any], Any]]] = {
    name: kind for kind, name in (_SEQUENCES | _MAPPINGS).items()
} | {"counter": lambda items: Counter(dict(items))}
# what comes of a tree that is none
UNREADABLE: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass(frozen=True)
class Snapshot:
    """State at one version: `tensors` on the CPU or where they were, `tree` is JSON that refers
    to them by path.
    """

    version: int
    tree: Json
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def unpack(self) -> Any:
        """Make the state of new objects: tensors are copies, those that were one tensor are one
        again.
        """
        return _Decoder(self.tensors).decode(self.tree)

    def check(self) -> None:
        """Raise CheckpointError for a snapshot that `unpack` can't read: another version of
        paceline may have written it, or a stranger.
        """
        if type(self.version) is not int:
            raise CheckpointError(f"the version of a state is a number, and not {self.version!r}")
        try:
            _Trial(self.tensors).decode(self.tree)
        except UNREADABLE as error:
            raise CheckpointError(
                f"state can't be read ({type(error).__name__}: {error}); load it with the paceline "
                "that wrote it"
            ) from error

    def sha256(self) -> str:
        """Hash the content, bit for bit; not the version, the order of dicts, strides or
        devices.
        """
        digest = hashlib.sha256(json.dumps(_canonical(self.tree), sort_keys=True).encode())
        for path in sorted(self.tensors):
            tensor = self.tensors[path]
            digest.update(f"\n{path} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(raw(tensor).numpy().data)
        return digest.hexdigest()

    def dumps(self) -> bytes:
        """Write as one block of bytes that `loads` reads, to be sent to another worker."""
        kept, notes = lower(self.tensors)
        head = json.dumps({"version": self.version, "tree": self.tree, "notes": notes}).encode()
        return struct.pack("<Q", len(head)) + head + safetensors.torch.save(kept)


def loads(data: bytes) -> Snapshot:
    """Read a snapshot from `Snapshot.dumps`; other bytes raise CheckpointError."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        head = json.loads(data[8 : 8 + length])
        snapshot = Snapshot(
            head["version"],
            head["tree"],
            lift(safetensors.torch.load(data[8 + length :]), head["notes"]),
        )
        snapshot.check()
    except (struct.error, *UNREADABLE, safetensors.SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"{len(data)} bytes are no snapshot ({error}); give what Snapshot.dumps gave"
        ) from error
    return snapshot


def pack(value: Any, version: int = 0, *, copy: bool = True) -> Snapshot:
    """Make a snapshot of nested state: dicts with any plain keys, lists, tuples, sets, tensors,
    numpy arrays, numbers, text, None.

    With `copy` the tensors are clones on their own device; without it they are the caller's, who
    must not change them while the snapshot is used. A tensor that is in two places is kept once.
    What can't be kept exactly raises CheckpointError with its path.
    """
    encoder = _Encoder(copy=copy)
    tree = encoder.encode(value, ())
    return Snapshot(version, tree, encoder.tensors)


def decode(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Make the state that a part of a snapshot's tree stands for; each tensor that it refers to
    is asked for once, and copied.
    """
    return _Decoder(tensors).decode(tree)


def entries(tree: Json) -> dict[Any, Json]:
    """Return the trees of what a dict holds, by its keys; nothing for a tree of anything else."""
    if not isinstance(tree, dict):
        return {}
    if "$" not in tree:
        return tree
    return dict(tree["items"]) if tree["$"] in ("dict", "ordered") else {}


def path_of(tree: Json) -> str | None:
    """Return the path of the tensor that a tree stands for; None for a tree of anything else."""
    return tree["path"] if isinstance(tree, dict) and tree.get("$") == "tensor" else None


def contiguous(tree: Json, paths: Container[str]) -> Json:
    """Make the same tree, in which these tensors have the strides of new ones."""
    if isinstance(tree, list):
        return [contiguous(item, paths) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if path_of(tree) in paths:
        return {key: value for key, value in tree.items() if key != "stride"}
    return {key: contiguous(value, paths) for key, value in tree.items()}


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes of any dense tensor, as a 1-D uint8 tensor on the CPU."""
    return flat(tensor.detach().cpu())


def byte_tensor(body: bytes) -> Tensor:
    """Copy bytes into a tensor that can be sent."""
    return (
        torch.frombuffer(bytearray(body), dtype=torch.uint8)
        if body
        else torch.empty(0, dtype=torch.uint8)
    )


def shaped(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Make the tensor whose bytes are `data` (1-D uint8): a view, or a copy where they begin at
    an address that doesn't suit its dtype.
    """
    # vector instructions on complex128 end the process there
    if data.data_ptr() % max(dtype.itemsize, WORD):
        data = data.clone()
    return data.view(dtype).view(shape)


def plain(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Convert tensors to dtypes that any version of safetensors can keep, with notes (dtype, shape)
    on those that were changed for it.

    Complex becomes a last dim of two reals, other dtypes become their bytes. All others are left as
    they are.
    """
    kept: dict[str, Tensor] = {}
    notes: dict[str, list[Any]] = {}
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in SAFE:
            kept[path] = tensor.detach()
        else:
            notes[path] = [dtype, list(tensor.shape)]
            real = tensor.is_complex() and tensor.dtype is not torch.complex32
            kept[path] = (
                torch.view_as_real(tensor.detach().resolve_conj().resolve_neg())
                if real
                else raw(tensor)
            )
    return kept, notes


def lower(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Convert as `plain` does, as safetensors wants them: contiguous, on the CPU, each with its
    storage to itself.
    """
    kept, notes = plain(tensors)
    for path, tensor in kept.items():
        here = tensor.cpu().resolve_neg().contiguous()
        kept[path] = here if here.untyped_storage().nbytes() == here.nbytes else here.clone()
    return kept, notes


def lift(kept: Mapping[str, Tensor], notes: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Restore the tensors that `plain` or `lower` was given."""
    tensors = dict(kept)
    for path, (dtype, shape) in notes.items():
        tensors[path] = shaped(kept[path].reshape(-1).view(torch.uint8), DTYPES[dtype], shape)
    return tensors


class _Encoder:
    def __init__(self, *, copy: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy = copy
        self._seen: dict[tuple[Any, ...], dict[str, Json]] = {}
        # a tensor that is freed in between would give its address to another
        self._alive: list[Tensor] = []
        self._open: set[int] = set()  # containers being encoded, to find those that hold themselves

    def encode(self, value: Any, path: tuple[str, ...]) -> Json:
        kind = type(value)
        if kind in (str, int, bool, type(None)):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if kind in (Tensor, nn.Parameter, nn.Buffer):
            return self._tensor(value, path)
        if kind is list or kind in _SEQUENCES or kind in _MAPPINGS:
            return self._container(value, path)
        if kind is bytes:
            return {"$": "bytes", "value": value.hex()}
        if kind is complex:
            return {"$": "complex", "value": [value.real.hex(), value.imag.hex()]}
        if kind in (torch.dtype, torch.device):
            return {"$": kind.__name__, "value": str(value).removeprefix("torch.")}
        if kind is np.ndarray or isinstance(value, np.generic):
            return {
                "$": "array" if kind is np.ndarray else "scalar",
                "of": self._tensor(self._numpy(value, path), path),
            }
        raise self._refused(value, path)

    def _container(self, value: Any, path: tuple[str, ...]) -> Json:
        if id(value) in self._open:
            raise CheckpointError(f"state {_where(path)} holds itself; state must be a tree")
        self._open.add(id(value))
        kind = type(value)
        tree: Json
        if kind in _MAPPINGS:
            tree = self._mapping(value, path)
        else:
            parts = sorted(value, key=repr) if kind in (set, frozenset) else value
            items = [self.encode(item, (*path, str(index))) for index, item in enumerate(parts)]
            tree = items if kind is list else {"$": _SEQUENCES[kind], "items": items}
        self._open.remove(id(value))
        return tree

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        kind = type(value)
        if kind is dict and all(type(key) is str and key != "$" for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.encode(key, (*path, str(key))), self.encode(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        tree = {"$": _MAPPINGS[kind], "items": items}
        if kind is OrderedDict and hasattr(value, "_metadata"):  # the versions of a model's modules
            kept = {
                name: {key: item for key, item in known.items() if key != MARK}
                for name, known in value._metadata.items()
            }
            tree["metadata"] = self.encode(OrderedDict(kept), (*path, "_metadata"))
        return tree

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Json]:
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_meta
            or tensor.is_nested
        ):
            raise self._refused(tensor, path)
        tensor = tensor.detach()
        place = tensor.data_ptr() if tensor.numel() else id(tensor)
        key = (
            tensor.device,
            place,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if key in self._seen:
            return self._seen[key]
        self._alive.append(tensor)
        name = _unique(path, self.tensors)
        self.tensors[name] = kept = tensor.clone() if self._copy else tensor
        tree: dict[str, Json] = {"$": "tensor", "path": name}
        self._seen[key] = tree
        if not kept.is_contiguous():
            # a dense one like it, if its own memory has holes
            stride = torch.empty_like(kept).stride()
            if stride != torch.empty(kept.shape).stride():
                tree["stride"] = list(stride)
        return tree

    def _numpy(self, value: Any, path: tuple[str, ...]) -> Tensor:
        try:
            return torch.from_numpy(np.array(value))
        except TypeError:  # text, objects, dates: torch has no such dtype
            raise self._refused(value, path) from None

    @staticmethod
    def _refused(value: Any, path: tuple[str, ...]) -> CheckpointError:
        what = type(value).__qualname__
        if isinstance(value, Tensor):
            what += (
                f" (layout {value.layout}{', quantized' if value.is_quantized else ''}, device "
                f"{value.device})"
            )
        elif isinstance(value, np.ndarray | np.generic):
            what += f" of {value.dtype}"
        return CheckpointError(
            f"state {_where(path)} is a {what}, which can't be kept: "
            "state is made of dense tensors, numpy arrays, numbers, text, None, "
            f"and dicts, lists, tuples and sets of these; have state_dict() give it as those"
        )


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}

    def decode(self, tree: Json) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        kind = tree["$"]
        if kind in _REBUILD:
            value = _REBUILD[kind](self._items(tree))
            if "metadata" in tree:
                value._metadata = self.decode(tree["metadata"])
            return value
        return self._leaf(kind, tree)

    def _items(self, tree: Json) -> Iterator[Any]:
        mapping = tree["$"] in _MAPPINGS.values()
        return (
            (self.decode(item[0]), self.decode(item[1])) if mapping else self.decode(item)
            for item in tree["items"]
        )

    def _leaf(self, kind: str, tree: Json) -> Any:
        if kind == "tensor":
            return self._tensor(tree)
        if kind in ("array", "scalar"):
            array = self._tensor(tree["of"]).numpy()
            return array if kind == "array" else array[()]
        value = tree.get("value")
        if kind == "float":
            return float(value)
        if kind == "bytes":
            return bytes.fromhex(value)
        if kind == "complex":
            return complex(*map(float.fromhex, value))
        if kind in ("dtype", "device"):
            return DTYPES[value] if kind == "dtype" else torch.device(value)
        raise CheckpointError(_foreign(kind))

    def _source(self, path: Json) -> Tensor:
        if path not in self._tensors:
            raise CheckpointError(_absent(path, self._tensors))
        return self._tensors[path]

    def _tensor(self, tree: Json) -> Tensor:
        path = tree["path"]
        if path not in self._made:
            source, stride = self._source(path), tree.get("stride")
            if stride is not None:
                new = torch.empty_strided(
                    source.shape, stride, dtype=source.dtype, device=source.device
                ).copy_(source)
            else:
                new = source.clone(memory_format=torch.contiguous_format)
            self._made[path] = new
        return self._made[path]


class _Trial(_Decoder):
    """Decodes without copying tensors, with small objects in their place, to see whether that
    can be done.
    """

    def _tensor(self, tree: Json) -> Tensor:
        source, stride = self._source(tree["path"]), tree.get("stride")
        if stride is not None and not _dense(source.shape, stride):
            raise CheckpointError(
                f"the tensor {tree['path']!r} of shape {list(source.shape)} is said to lie with "
                f"strides {stride}"
            )
        return torch.empty((1,) * bool(source.dim()), dtype=source.dtype).clone()


def _dense(shape: Sequence[int], stride: Any) -> bool:
    """Whether the elements lie one beside the other with these strides, in whatever order."""
    if (
        not isinstance(stride, list)
        or len(stride) != len(shape)
        or any(type(step) is not int for step in stride)
    ):
        return False
    after = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != after:
            return False
        after *= length if length > 1 else 1
    return all(0 <= step < 1 << 62 for step in stride)


def _foreign(kind: Json) -> str:
    return (
        f"state holds {kind!r}, which this version of paceline doesn't know; "
        "load it with the one that wrote it"
    )


def _absent(path: str, tensors: Mapping[str, Tensor]) -> str:
    return f"state refers to the tensor {path!r}, which is not there; it has {len(tensors)} others"


def _canonical(tree: Json) -> Json:
    """Make the same tree of dicts that differ in their order only, and of tensors that differ in
    their strides only.
    """
    if isinstance(tree, list):
        return [_canonical(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == "tensor":
        return {"$": "tensor", "path": tree["path"]}
    if tree.get("$") in ("dict", "counter"):
        return {
            "$": tree["$"],
            "items": sorted((_canonical(item) for item in tree["items"]), key=json.dumps),
        }
    return {key: _canonical(item) for key, item in tree.items()}


def _unique(path: tuple[str, ...], taken: Iterable[str]) -> str:
    """Write a path as text; keys that only differ in their type (1 and "1") are told apart by a
    number.
    """
    name = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)
    candidate, suffix = name, 1
    while candidate in taken or candidate == _RESERVED:
        suffix += 1
        candidate = f"{name}#{suffix}"
    return candidate


def _where(path: tuple[str, ...]) -> str:
    return repr("/".join(path)) if path else "as a whole"
