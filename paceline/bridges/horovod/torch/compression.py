"""Compression of gradients on their way: none, or 16-bit floating point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Sends floating-point tensors as float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Convert to float16. Returns the tensor and its dtype."""
        halved = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return halved, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Convert back to the dtype that `compress` returned."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Choices for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
