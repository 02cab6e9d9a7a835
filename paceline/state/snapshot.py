"""Snapshots: convert nested state to a map of tensors and a tree of JSON, and back, exactly.

Plain JSON stands for itself. Any other value is an object with its kind under the key "$":

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
from paceline.state.checksum import view_bytes

Json = Any  # values of json.dumps: dict, list, str, int, finite float, bool, None

# Dtypes by the names under which they are written.
DTYPES: Final[dict[str, torch.dtype]] = {
    str(kind).removeprefix("torch."): kind
    for kind in vars(torch).values()
    if isinstance(kind, torch.dtype)
}
WORD_BYTES: Final = 8
# Entry in the metadata of a module with the parts of its parameters that a worker has. It differs
# between workers, and isn't saved.
PARTS_ENTRY: Final = "paceline.parts"
_RESERVED_NAME: Final = "__metadata__"  # a name that safetensors uses itself
# Dtypes that every version of safetensors can store.
SAFE_DTYPES: Final = frozenset(
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
_SEQUENCE_KINDS: Final[dict[type, str]] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
}
_MAPPING_KINDS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_CONSTRUCTORS: Final[dict[str, Callable[[Any], Any]]] = {
    name: kind for kind, name in (_SEQUENCE_KINDS | _MAPPING_KINDS).items()
} | {"counter": lambda items: Counter(dict(items))}
# Errors that decoding may raise for JSON that isn't a valid tree.
DECODING_ERRORS: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


@dataclass(frozen=True)
class Snapshot:
    """State at one version, as tensors by path, and a tree of JSON that refers to the paths."""

    version: int
    tree: Json
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def unpack_state(self) -> Any:
        """Make the state, of new objects.

        Tensors are copies. A tensor that was in several places of the state is one object again.
        """
        return _Decoder(self.tensors).decode_value(self.tree)

    def check_readable(self) -> None:
        """Raise `CheckpointError` if `unpack_state` couldn't read this snapshot.

        It may come from another version of paceline, or from another program.
        """
        if type(self.version) is not int:
            raise CheckpointError(f"the version of a state must be a number, not {self.version!r}")
        try:
            _TrialDecoder(self.tensors).decode_value(self.tree)
        except DECODING_ERRORS as error:
            raise CheckpointError(
                f"state can't be read ({type(error).__name__}: {error}); load it with the paceline "
                "that wrote it"
            ) from error

    def compute_sha256(self) -> str:
        """Hash the content, bit for bit.

        The version, the order of dicts, strides and devices are left out.
        """
        digest = hashlib.sha256(json.dumps(_make_canonical(self.tree), sort_keys=True).encode())
        for path in sorted(self.tensors):
            tensor = self.tensors[path]
            digest.update(f"\n{path} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(view_cpu_bytes(tensor).numpy().data)
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """Convert to bytes that can be sent to another worker. `snapshot_from_bytes` reads them."""
        stored, notes = convert_for_safetensors(self.tensors)
        head = json.dumps({"version": self.version, "tree": self.tree, "notes": notes}).encode()
        return struct.pack("<Q", len(head)) + head + safetensors.torch.save(stored)


def snapshot_from_bytes(data: bytes) -> Snapshot:
    """Read a snapshot from the bytes of `Snapshot.to_bytes`.

    Raises `CheckpointError` for other bytes.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        head = json.loads(data[8 : 8 + length])
        snapshot = Snapshot(
            head["version"],
            head["tree"],
            restore_dtypes(safetensors.torch.load(data[8 + length :]), head["notes"]),
        )
        snapshot.check_readable()
    except (struct.error, *DECODING_ERRORS, safetensors.SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"{len(data)} bytes are not a snapshot ({error}); give the bytes of Snapshot.to_bytes"
        ) from error
    return snapshot


def make_snapshot(value: Any, version: int = 0, *, copy: bool = True) -> Snapshot:
    """Make a snapshot of nested state.

    >>> make_snapshot({"lr": 0.1, "betas": (0.9, 0.99)}).tree
    {'lr': 0.1, 'betas': {'$': 'tuple', 'items': [0.9, 0.99]}}

    Args:
        value: Nested dicts with any plain keys, lists, tuples, sets, tensors, numpy arrays,
            numbers, text and None. A tensor that is in several places is stored once.
        version: Version of the state.
        copy: Whether tensors are cloned, on their devices. If not, the caller must not change them
            while the snapshot is used. Default: True.

    Raises:
        CheckpointError: A value can't be stored exactly. The message has its path.
    """
    encoder = _Encoder(copy=copy)
    tree = encoder.encode_value(value, ())
    return Snapshot(version, tree, encoder.tensors)


def decode_tree(tree: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Make the state of a part of a snapshot's tree.

    Each tensor that it refers to is read from `tensors` once, and copied.
    """
    return _Decoder(tensors).decode_value(tree)


def subtrees_by_key(tree: Json) -> dict[Any, Json]:
    """Subtrees of the items of a dict, by key. Empty if the tree isn't a dict."""
    if not isinstance(tree, dict):
        return {}
    if "$" not in tree:
        return tree
    return dict(tree["items"]) if tree["$"] in ("dict", "ordered") else {}


def tensor_path(tree: Json) -> str | None:
    """Path of a tensor. None if the tree isn't a tensor."""
    return tree["path"] if isinstance(tree, dict) and tree.get("$") == "tensor" else None


def drop_strides(tree: Json, paths: Container[str]) -> Json:
    """Copy a tree without the strides of some tensors, so that these become contiguous."""
    if isinstance(tree, list):
        return [drop_strides(item, paths) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tensor_path(tree) in paths:
        return {key: value for key, value in tree.items() if key != "stride"}
    return {key: drop_strides(value, paths) for key, value in tree.items()}


def view_cpu_bytes(tensor: Tensor) -> Tensor:
    """View the bytes of a dense tensor as 1-D uint8 on the CPU."""
    return view_bytes(tensor.detach().cpu())


def copy_to_tensor(body: bytes) -> Tensor:
    """Copy bytes into a 1-D uint8 tensor, which groups can send."""
    return (
        torch.frombuffer(bytearray(body), dtype=torch.uint8)
        if body
        else torch.empty(0, dtype=torch.uint8)
    )


def view_as_tensor(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View bytes (1-D uint8) as a tensor. They are copied if their address isn't aligned."""
    # For complex128 at an unaligned address, vector instructions crash the process.
    if data.data_ptr() % max(dtype.itemsize, WORD_BYTES):
        data = data.clone()
    return data.view(dtype).view(shape)


def convert_dtypes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Convert tensors to dtypes that every version of safetensors can store.

    Complex tensors get a last dim of two reals. Tensors of other unsafe dtypes become bytes. All
    others stay as they are.

    Returns:
        The tensors, and notes on the converted ones: dtype and shape by path.
    """
    stored: dict[str, Tensor] = {}
    notes: dict[str, list[Any]] = {}
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in SAFE_DTYPES:
            stored[path] = tensor.detach()
        else:
            notes[path] = [dtype, list(tensor.shape)]
            # torch can't view complex32 as reals.
            has_real_view = tensor.is_complex() and tensor.dtype is not torch.complex32
            stored[path] = (
                torch.view_as_real(tensor.detach().resolve_conj().resolve_neg())
                if has_real_view
                else view_cpu_bytes(tensor)
            )
    return stored, notes


def convert_for_safetensors(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Convert tensors as `convert_dtypes` does, and to the CPU, in the form for safetensors.

    safetensors needs contiguous tensors that don't share their storage with others.
    """
    stored, notes = convert_dtypes(tensors)
    for path, tensor in stored.items():
        dense = tensor.cpu().resolve_neg().contiguous()
        stored[path] = dense if dense.untyped_storage().nbytes() == dense.nbytes else dense.clone()
    return stored, notes


def restore_dtypes(
    stored: Mapping[str, Tensor], notes: Mapping[str, list[Any]]
) -> dict[str, Tensor]:
    """Convert tensors of `convert_dtypes` or `convert_for_safetensors` back, with their notes."""
    tensors = dict(stored)
    for path, (dtype, shape) in notes.items():
        tensors[path] = view_as_tensor(
            stored[path].reshape(-1).view(torch.uint8), DTYPES[dtype], shape
        )
    return tensors


class _Encoder:
    """Converts a state to a tree, and collects its tensors."""

    def __init__(self, *, copy: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy = copy
        self._trees_by_tensor: dict[tuple[Any, ...], dict[str, Json]] = {}
        # Tensors are identified by their addresses. If one were freed in between, another could get
        # its address.
        self._kept_alive: list[Tensor] = []
        # Ids of containers that are being encoded, to find containers that contain themselves.
        self._open_containers: set[int] = set()

    def encode_value(self, value: Any, path: tuple[str, ...]) -> Json:
        """Convert a value at a path to a tree."""
        # The exact type: a subclass may have more state than its base.
        kind = type(value)
        if kind in (str, int, bool, type(None)):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if kind in (Tensor, nn.Parameter, nn.Buffer):
            return self._encode_tensor(value, path)
        if kind is list or kind in _SEQUENCE_KINDS or kind in _MAPPING_KINDS:
            return self._encode_container(value, path)
        if kind is bytes:
            return {"$": "bytes", "value": value.hex()}
        if kind is complex:
            return {"$": "complex", "value": [value.real.hex(), value.imag.hex()]}
        if kind in (torch.dtype, torch.device):
            return {"$": kind.__name__, "value": str(value).removeprefix("torch.")}
        if kind is np.ndarray or isinstance(value, np.generic):
            return {
                "$": "array" if kind is np.ndarray else "scalar",
                "of": self._encode_tensor(self._convert_numpy(value, path), path),
            }
        raise self._make_refusal(value, path)

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Json:
        if id(value) in self._open_containers:
            raise CheckpointError(
                f"state {_format_path(path)} contains itself; state must be a tree"
            )
        self._open_containers.add(id(value))
        kind = type(value)
        tree: Json
        if kind in _MAPPING_KINDS:
            tree = self._encode_mapping(value, path)
        else:
            # Sets have no order of their own, and equal states have to give equal trees.
            elements = sorted(value, key=repr) if kind in (set, frozenset) else value
            items = [
                self.encode_value(item, (*path, str(index))) for index, item in enumerate(elements)
            ]
            tree = items if kind is list else {"$": _SEQUENCE_KINDS[kind], "items": items}
        self._open_containers.remove(id(value))
        return tree

    def _encode_mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Json:
        kind = type(value)
        if kind is dict and all(type(key) is str and key != "$" for key in value):
            return {key: self.encode_value(item, (*path, key)) for key, item in value.items()}
        items = [
            [self.encode_value(key, (*path, str(key))), self.encode_value(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        tree = {"$": _MAPPING_KINDS[kind], "items": items}
        # `nn.Module.state_dict` puts the versions of modules into this private attribute, and
        # `load_state_dict` reads it to convert states of older versions. If torch renamed it, such
        # states would be loaded as if they were new.
        if kind is OrderedDict and hasattr(value, "_metadata"):
            metadata = {
                name: {key: item for key, item in entry.items() if key != PARTS_ENTRY}
                for name, entry in value._metadata.items()
            }
            tree["metadata"] = self.encode_value(OrderedDict(metadata), (*path, "_metadata"))
        return tree

    def _encode_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Json]:
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_meta
            or tensor.is_nested
        ):
            raise self._make_refusal(tensor, path)
        tensor = tensor.detach()
        # Tensors with the same memory and form are one tensor. Empty ones have no address.
        identity = tensor.data_ptr() if tensor.numel() else id(tensor)
        key = (
            tensor.device,
            identity,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if key in self._trees_by_tensor:
            return self._trees_by_tensor[key]
        self._kept_alive.append(tensor)
        name = _make_unique_name(path, self.tensors)
        self.tensors[name] = stored = tensor.clone() if self._copy else tensor
        tree: dict[str, Json] = {"$": "tensor", "path": name}
        self._trees_by_tensor[key] = tree
        if not stored.is_contiguous():
            # `empty_like` has the order of the dims, but no gaps, which the tensor may have.
            stride = torch.empty_like(stored).stride()
            if stride != torch.empty(stored.shape).stride():
                tree["stride"] = list(stride)
        return tree

    def _convert_numpy(self, value: Any, path: tuple[str, ...]) -> Tensor:
        try:
            return torch.from_numpy(np.array(value))
        except TypeError:
            # Text, objects and dates: torch has no such dtypes.
            raise self._make_refusal(value, path) from None

    @staticmethod
    def _make_refusal(value: Any, path: tuple[str, ...]) -> CheckpointError:
        description = type(value).__qualname__
        if isinstance(value, Tensor):
            description += (
                f" (layout {value.layout}{', quantized' if value.is_quantized else ''}, device "
                f"{value.device})"
            )
        elif isinstance(value, np.ndarray | np.generic):
            description += f" of {value.dtype}"
        return CheckpointError(
            f"state {_format_path(path)} is a {description}, which can't be saved: "
            "state is made of dense tensors, numpy arrays, numbers, text, None, "
            f"and dicts, lists, tuples and sets of these; let state_dict() convert it to these"
        )


class _Decoder:
    """Makes a state from a tree and tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._decoded_tensors: dict[str, Tensor] = {}

    def decode_value(self, tree: Json) -> Any:
        """Make the value of a tree."""
        if isinstance(tree, list):
            return [self.decode_value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self.decode_value(item) for key, item in tree.items()}
        kind = tree["$"]
        if kind in _CONSTRUCTORS:
            value = _CONSTRUCTORS[kind](self._decode_items(tree))
            if "metadata" in tree:
                value._metadata = self.decode_value(tree["metadata"])
            return value
        return self._decode_leaf(kind, tree)

    def _decode_items(self, tree: Json) -> Iterator[Any]:
        mapping = tree["$"] in _MAPPING_KINDS.values()
        return (
            (self.decode_value(item[0]), self.decode_value(item[1]))
            if mapping
            else self.decode_value(item)
            for item in tree["items"]
        )

    def _decode_leaf(self, kind: str, tree: Json) -> Any:
        if kind == "tensor":
            return self._decode_tensor(tree)
        if kind in ("array", "scalar"):
            array = self._decode_tensor(tree["of"]).numpy()
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
        raise CheckpointError(_describe_unknown_kind(kind))

    def _find_source(self, path: Json) -> Tensor:
        if path not in self._tensors:
            raise CheckpointError(_describe_missing_tensor(path, self._tensors))
        return self._tensors[path]

    def _decode_tensor(self, tree: Json) -> Tensor:
        path = tree["path"]
        if path not in self._decoded_tensors:
            source, stride = self._find_source(path), tree.get("stride")
            if stride is not None:
                new = torch.empty_strided(
                    source.shape, stride, dtype=source.dtype, device=source.device
                ).copy_(source)
            else:
                new = source.clone(memory_format=torch.contiguous_format)
            self._decoded_tensors[path] = new
        return self._decoded_tensors[path]


class _TrialDecoder(_Decoder):
    """Decodes without copying tensors, only to see errors. Tiny tensors stand for real ones."""

    def _decode_tensor(self, tree: Json) -> Tensor:
        source, stride = self._find_source(tree["path"]), tree.get("stride")
        if stride is not None and not _is_dense(source.shape, stride):
            raise CheckpointError(
                f"the tensor {tree['path']!r} of shape {list(source.shape)} can't have the "
                f"strides {stride}"
            )
        return torch.empty((1,) * bool(source.dim()), dtype=source.dtype).clone()


def _is_dense(shape: Sequence[int], stride: Any) -> bool:
    """Whether a tensor with these strides has no gaps and no overlaps, in any order of its dims."""
    if (
        not isinstance(stride, list)
        or len(stride) != len(shape)
        or any(type(step) is not int for step in stride)
    ):
        return False
    expected_step = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length > 1 and step != expected_step:
            return False
        expected_step *= length if length > 1 else 1
    return all(0 <= step < 1 << 62 for step in stride)


def _describe_unknown_kind(kind: Json) -> str:
    return (
        f"state has {kind!r}, which this version of paceline doesn't know; "
        "load it with the version that wrote it"
    )


def _describe_missing_tensor(path: str, tensors: Mapping[str, Tensor]) -> str:
    return f"state refers to the tensor {path!r}, which is missing; it has {len(tensors)} others"


def _make_canonical(tree: Json) -> Json:
    """Copy a tree without the order of dicts and the strides of tensors."""
    if isinstance(tree, list):
        return [_make_canonical(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == "tensor":
        return {"$": "tensor", "path": tree["path"]}
    if tree.get("$") in ("dict", "counter"):
        return {
            "$": tree["$"],
            "items": sorted((_make_canonical(item) for item in tree["items"]), key=json.dumps),
        }
    return {key: _make_canonical(item) for key, item in tree.items()}


def _make_unique_name(path: tuple[str, ...], taken: Iterable[str]) -> str:
    """Format a path as text that isn't taken yet.

    Paths whose keys differ only in their type, such as 1 and "1", get different suffixes.
    """
    name = "/".join(key.replace("~", "~0").replace("/", "~1") for key in path)
    candidate, suffix = name, 1
    while candidate in taken or candidate == _RESERVED_NAME:
        suffix += 1
        candidate = f"{name}#{suffix}"
    return candidate


def _format_path(path: tuple[str, ...]) -> str:
    return repr("/".join(path)) if path else "as a whole"
