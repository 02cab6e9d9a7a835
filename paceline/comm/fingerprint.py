"""Fingerprints of collective calls: short texts that ranks compare before anything moves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group_protocol import OPS
from paceline.errors import Mismatch, UsageError

DIGEST = 16  # bytes
OWN = "in memory of its own"  # a place that agrees with any other
MOVING = "in memory that may move"  # a place that ranks say more about when they meet


class CallFingerprint(NamedTuple):
    """One collective call of one rank. All fields but `flaw` must be the same on all ranks.

    kind: Name of the collective.
    name: The caller's word for the call, if it gave one.
    shape: Shape of the tensor. "*" is a dim that may differ.
    dtype: Dtype of the tensor.
    detail: Everything else that must agree: operation, root, device.
    flaw: What is wrong with this rank's arguments. If one rank has a flaw, all ranks raise
        `UsageError`.
    place: Where this rank's tensor lies, if the way of the exchange depends on it: see `OWN`.
    """

    kind: str
    name: str | None = None
    shape: tuple[int | str, ...] | None = None
    dtype: torch.dtype | None = None
    detail: str = ""
    flaw: str = ""
    place: str = ""

    def __str__(self) -> str:
        name = f" of {self.name!r}" if self.name is not None else ""
        tensor = (
            f" ({str(self.dtype).removeprefix('torch.')} [{', '.join(map(str, self.shape))}])"
            if self.shape is not None
            else ""
        )
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.kind}{name}{tensor}{detail}"


@lru_cache(maxsize=65_536)
def digest_call(call: CallFingerprint) -> bytes:
    """Hash a call with its flaw and place. Cached: the same calls come back at every step."""
    return blake2b(f"{call}\0{call.flaw}\0{call.place}".encode(), digest_size=DIGEST).digest()


def describe_sides(
    texts: Sequence[str], names: Sequence[int] | None = None, lines: Sequence[str] = ()
) -> str:
    """Describe which ranks are where: `rank 0 at barrier; ranks 1, 2 at all_reduce of 'w'`.

    Args:
        texts: The call of each rank; empty ones are left out.
        names: Rank of each member among all workers. Default: the ranks themselves.
        lines: Line of the script of each rank, as ` (train.py:12)`. Default: unknown.
    """
    by_text: dict[str, tuple[list[str], dict[str, None]]] = {}
    # Ranks with the same text stand together, with all lines that they are at.
    for rank, (text, line) in enumerate(zip(texts, lines or [""] * len(texts), strict=True)):
        if text:
            ranks, places = by_text.setdefault(text, ([], {}))
            ranks.append(str(rank if names is None else names[rank]))
            places.update({line.strip(" ()"): None} if line else {})
    return "; ".join(
        _describe_side(ranks, text, list(places)) for text, (ranks, places) in by_text.items()
    )


def _describe_side(ranks: list[str], text: str, places: list[str]) -> str:
    where = f" ({', '.join(places)})" if places else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} at {text}{where}"


def check_calls_agree(
    calls: Sequence[tuple[str, str]], names: Sequence[int] | None = None, lines: Sequence[str] = ()
) -> None:
    """Raise the error that all ranks have to raise about their calls, if there is one.

    Args:
        calls: The (text, flaw) of each rank, in rank order.
        names: Rank of each member among all workers. Default: the ranks themselves.
        lines: Line of the script of each rank, by `callsite.find_user_line`. Default: unknown.

    Raises:
        Mismatch: Ranks make different calls.
        UsageError: All make the same call, and the arguments of one of them have a flaw.
    """
    # First whether the calls differ: only then do flaws of one and the same call matter.
    texts = [text for text, _ in calls]
    if any(text != texts[0] for text in texts):
        where = describe_sides(texts, names, lines)
        raise Mismatch(
            f"workers have come apart: {where}. Every worker has to make the same collective calls "
            "in the same order"
        )
    flaws = [(rank, flaw) for rank, (_, flaw) in enumerate(calls) if flaw]
    if flaws:
        rank, flaw = flaws[0]
        raise UsageError(f"{texts[0]}: {flaw} (rank {rank if names is None else names[rank]})")


def device_suffix(x: Tensor) -> str:
    """Name the tensor's device for a call's detail. Empty for the CPU."""
    return "" if x.device.type == "cpu" else f" on {x.device.type}"


def reduction_call(
    kind: str, x: Tensor, op: str, name: str | None, out: Tensor | None = None
) -> CallFingerprint:
    """Make the fingerprint of a reduction of `x`."""
    flaw = dense_flaw(x) or ("" if out is None else overlap_flaw(out))
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype or out.device != x.device):
        flaw = (
            f"out is {out.dtype} {list(out.shape)} on {out.device}, which has to be as x: "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )
    elif op not in OPS:
        flaw = f"op={op!r} is unknown; there are {', '.join(OPS)}"
    return CallFingerprint(kind, name, tuple(x.shape), x.dtype, f"{op}{device_suffix(x)}", flaw)


def rows_call(kind: str, x: Tensor, name: str | None) -> CallFingerprint:
    """Make the fingerprint of a call that moves `x`, whose first dim may differ between ranks."""
    shape = ("*", *x.shape[1:]) if x.dim() else ()
    return CallFingerprint(kind, name, shape, x.dtype, device_suffix(x).strip(), dense_flaw(x))


def broadcast_call(x: Tensor, root: int, size: int, name: str | None) -> CallFingerprint:
    """Make the fingerprint of a broadcast of `x` from `root`."""
    flaw = (
        (dense_flaw(x) or overlap_flaw(x))
        if 0 <= root < size
        else f"root={root} is not a rank; there are 0..{size - 1}"
    )
    return CallFingerprint(
        "broadcast", name, tuple(x.shape), x.dtype, f"root {root}{device_suffix(x)}", flaw
    )


def all_to_all_call(xs: Sequence[Tensor], size: int, name: str | None) -> CallFingerprint:
    """Make the fingerprint of an all_to_all of `xs`."""
    if len(xs) != size:
        return CallFingerprint(
            "all_to_all", name, flaw=f"{len(xs)} tensors for {size} ranks; give one for each rank"
        )
    call = rows_call("all_to_all", xs[0], name)
    for rank, x in enumerate(xs):
        # All tensors must agree in everything but the first dim: kind to detail, without the flaw.
        if rows_call("all_to_all", x, name)[:5] != call[:5]:
            flaw = (
                f"the tensor for rank {rank} is {x.dtype} {list(x.shape)}, the one for rank 0 "
                f"{xs[0].dtype} {list(xs[0].shape)}"
            )
            return call._replace(flaw=f"{flaw}; only the first dim may differ")
    return call


def subgroup_call(ranks: Sequence[int], size: int) -> CallFingerprint:
    """Make the fingerprint of the call that makes a subgroup of `ranks`."""
    flaw = ""
    if not ranks or len(set(ranks)) != len(ranks) or any(not 0 <= rank < size for rank in ranks):
        flaw = f"the ranks of a subgroup are different numbers of 0..{size - 1}, at least one"
    return CallFingerprint("sub", detail=f"ranks {', '.join(map(str, ranks))}", flaw=flaw)


def describe_message(x: Tensor) -> str:
    """Describe one message of an exchange: number of elements and dtype."""
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"


def exchange_call(
    sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int, size: int
) -> CallFingerprint:
    """Make the fingerprint of an exchange. Its messages are compared apart, pair by pair."""
    flaws = [
        f"rank {peer} does not exist; there are 0..{size - 1}"
        for peer, _ in (*sends, *recvs)
        if not 0 <= peer < size
    ]
    flaws += [flaw for _, x in (*sends, *recvs) if (flaw := dense_flaw(x))]
    flaws += [flaw for _, x in recvs if (flaw := overlap_flaw(x))]
    return CallFingerprint("exchange", detail=f"tag {tag}", flaw=flaws[0] if flaws else "")


def check_messages_match(
    sides: Sequence[Sequence[Sequence[tuple[int, str]]]], names: Sequence[int]
) -> None:
    """Raise `Mismatch` if one rank sends other messages than its receiver expects.

    Args:
        sides: Messages of each rank, (sends, recvs), each as (peer, `describe_message`).
        names: Rank of each member among all workers.
    """
    for source, (sends, _) in enumerate(sides):
        for to, (_, recvs) in enumerate(sides):
            sent = [text for peer, text in sends if peer == to]
            expected = [text for peer, text in recvs if peer == source]
            if sent != expected:
                offers, expects = ", ".join(sent) or "nothing", ", ".join(expected) or "nothing"
                raise Mismatch(
                    f"exchange: rank {names[source]} sends {offers} to rank {names[to]}, which "
                    f"expects {expects}"
                )


def objects_call(obj: Any, name: str | None) -> tuple[str, CallFingerprint]:
    """Encode `obj` as JSON, and make the fingerprint of the call that gathers it."""
    try:
        return json.dumps(obj), CallFingerprint("gather_objects", name)
    except (TypeError, ValueError) as error:
        return "", CallFingerprint(
            "gather_objects",
            name,
            flaw=(
                f"{type(obj).__name__} is not JSON (dict, list, str, int, float, "
                f"bool, None): {error}"
            ),
        )


def dense_flaw(x: Tensor) -> str:
    """Describe why `x` can't be exchanged. Empty if it can."""
    if x.layout is not torch.strided:
        return (
            f"a tensor of layout {x.layout} can't be exchanged; exchange its values and indices, "
            "or x.to_dense()"
        )
    if x.is_meta:
        return (
            "a tensor on the device meta has no values that could be exchanged; "
            "make it on another device"
        )
    return "a quantized tensor can't be exchanged; exchange x.int_repr()" if x.is_quantized else ""


def overlap_flaw(x: Tensor) -> str:
    """Describe why no result can be written to `x`. Empty if one can."""
    if x.layout is not torch.strided or x.is_contiguous():
        return ""
    # A stride of 0 in a dim of several elements: they share one place in memory.
    if any(length > 1 and not stride for length, stride in zip(x.shape, x.stride(), strict=True)):
        return (
            "elements of a tensor that was expanded share memory, so no result can be written "
            "there; give x.clone()"
        )
    return ""
