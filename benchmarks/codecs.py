"""Measures how long codings of float32 take to encode and decode.

They are compared with int8 by a fused kernel of torch.compile. There is one process with one
thread, as in the exchange of a worker. Decoded values are checked.

    python benchmarks/codecs.py [--sizes 8M 100M] [--codings 'int8()' 'topk(0.01)']
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from harness import Row, arguments, interleave, ratio, report

CODINGS = (
    "half()",
    "int8()",
    "int8(rounding='stochastic')",
    "int4()",
    "sign()",
    "topk(0.01)",
    "topk(0.01, threshold='sampled')",
    "randomk(0.01)",
    "compose(topk(0.01, threshold='sampled'), int8())",
)
BLOCK = 1024
MOST = 1.5  # highest ratio to the fused kernel, encoding and decoding together, for 100 MB


def timed(act: Callable[[], object]) -> Callable[[], float]:
    """Make a function that calls `act`, and returns the seconds that it took."""

    def run() -> float:
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    return run


def fused(x: Any) -> dict[str, Callable[[], object]]:
    """Make functions that encode and decode int8 in blocks, by torch.compile."""
    import torch

    def encode(x: Any) -> Any:
        rows = x.view(-1, BLOCK)
        scale = rows.abs().amax(1) * (1 / 127)
        return (rows / scale.clamp_min(1e-30)[:, None]).round().to(torch.int8), scale

    def decode(levels: Any, scale: Any) -> Any:
        return levels.float() * scale[:, None]

    compiled_encode, compiled_decode = torch.compile(encode), torch.compile(decode)
    # Compile before the measurement.
    message = compiled_encode(x)
    compiled_decode(*message)
    return {
        "fused int8, encode": lambda: compiled_encode(x),
        "fused int8, decode": lambda: compiled_decode(*message),
    }


def ours(text: str, x: Any) -> dict[str, Callable[[], object]]:
    """Make functions that encode and decode by a coding.

    `text` is the coding in words. Raises `RuntimeError` if decoded values are useless.
    """
    import torch

    from paceline.codec.coding import make_message
    from paceline.notation import parse_notation

    coding = parse_notation(text)
    _, message = make_message(coding, x.numel())
    out = torch.empty_like(x)
    coding.encode(x, message)
    coding.decode(message, out)
    # A coding that is worse than sending nothing is broken.
    if float((out - x).norm()) > float(x.norm()):
        raise RuntimeError(f"{text}: decoded values are worse than zeros")
    return {
        f"{text}, encode": lambda: coding.encode(x, message),
        f"{text}, decode": lambda: coding.decode(message, out),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "codecs", rounds=9)
    parser.add_argument("--sizes", nargs="+", default=["8M", "100M"])
    parser.add_argument("--codings", nargs="+", default=CODINGS)
    options = parser.parse_args(words)
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for size in options.sizes:
        # The fused kernel needs whole blocks.
        count = int(float(size.removesuffix("M")) * 1e6) // 4 // BLOCK * BLOCK
        x = torch.randn(count, generator=torch.Generator().manual_seed(0))
        acts = fused(x)
        for text in options.codings:
            acts |= ours(text, x)
        samples = interleave({name: timed(act) for name, act in acts.items()}, options.rounds)
        total_seconds = {
            text: [
                encode_seconds + decode_seconds
                for encode_seconds, decode_seconds in zip(
                    samples[f"{text}, encode"], samples[f"{text}, decode"], strict=True
                )
            ]
            for text in ("fused int8", *options.codings)
        }
        for text in options.codings:
            medians = {
                side: statistics.median(samples[f"{text}, {side}"]) for side in ("encode", "decode")
            }
            bar = MOST if text == "int8()" and size == "100M" else None
            rows.append(
                Row(
                    f"{size}, {text}",
                    medians,
                    "of the fused int8's, both ways",
                    ratio(total_seconds[text], total_seconds["fused int8"]),
                    most=bar,
                )
            )
        raw[size] = samples
    if not report("codecs", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
