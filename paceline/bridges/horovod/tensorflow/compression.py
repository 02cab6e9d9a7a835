"""How tensors of TensorFlow are made smaller before they are summed."""

from __future__ import annotations

from typing import Any, Final, Protocol

import tensorflow as tf

WIDE: Final = (tf.float32, tf.float64)


class Compressor(Protocol):
    """Makes a tensor smaller, and makes the sum of small ones a tensor of the first kind again."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the smaller tensor, and whatever `decompress` has to know."""
        ...

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return a tensor like the one before `compress`."""
        ...


class PlainCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor."""
        return tensor


class HalfCompressor:
    """Sends float32 and float64 as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Cast to float16; the second value is the dtype from before."""
        if tensor.dtype not in WIDE:
            return tensor, None
        return tf.cast(tensor, tf.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Cast back."""
        return tensor if context is None else tf.cast(tensor, context)


class TensorCompression:
    """The compressors: `Compression.none` and `Compression.fp16`."""

    none = PlainCompressor
    fp16 = HalfCompressor
