"""Measures messages of float32 tensors between two processes of a host, against Gloo.

Gloo's isend and irecv know each shape beforehand, and receive into existing tensors. paceline's
receiver learns the shape from each message, and gets new tensors. Each sample is a batch of one
pattern. Variants take turns, and received tensors are compared with the sent ones.

    round trip   a tensor goes to the other process and comes back
    stream       8 tensors go one way, one after the other, and an answer of 4 bytes comes back

    python benchmarks/pairs.py [--sizes 64K 1M 4M]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Crew, Message, Row, arguments, interleave, ratio, report, serve

HERE = Path(__file__).resolve().parent
SIZES = {"64K": 64 << 10, "1M": 1 << 20, "4M": 4 << 20}
PATTERNS = ("round trip", "stream")
STREAM = 8  # tensors in a stream
TOUCHED = 16 << 20  # fewest bytes that are sent between two readings of the clock
BARS = {"shared memory": 1.0, "TCP": None}  # lowest ratios to Gloo


class Peer:
    """One of the two processes. It can send and receive with each variant."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.other, self.torch, self.dist = rank, 1 - rank, torch, dist
        self.pairs: dict[str, Any] = {}
        self.count = 0

    def join(self, folder: str) -> None:
        """Connect with the other process, by Gloo and by both ways of paceline."""
        from paceline.cluster.store import Store
        from paceline.comm.native.torch_group import TorchGroup
        from paceline.comm.pairs import connect_pairs
        from paceline.comm.shm.shared_group import SharedGroup

        self.dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=self.rank, world_size=2
        )
        store = Store(self.dist.FileStore(f"{folder}/paceline", 2), path="paceline")
        self.pairs["shared memory"] = connect_pairs(
            SharedGroup.from_store(store.open_substore("shared"), self.rank, 2, deadline=60.0)
        )
        self.pairs["TCP"] = connect_pairs(
            TorchGroup.from_store(
                store.open_substore("network"), self.rank, 2, hosts=[0, 1], deadline=60.0
            )
        )

    def prepare(self, nbytes: int) -> Message:
        """Make tensors with different values, and memory for Gloo to receive into."""
        torch = self.torch
        self.data = [torch.full((nbytes // 4,), float(index + 1)) for index in range(STREAM)]
        self.room = [torch.zeros(nbytes // 4) for _ in range(STREAM)]
        self.note = torch.zeros(1)
        return {}

    def send(self, variant: str, x: Any) -> Any:
        """Begin to send a tensor. Returns an object to wait on."""
        return (
            self.dist.isend(x, self.other)
            if variant == "gloo"
            else self.pairs[variant].send(self.other, 0, {}, [x])
        )

    def receive(self, variant: str, room: Any) -> Callable[[], Any]:
        """Begin to receive a tensor. Returns a function that waits for it."""
        if variant != "gloo":
            work = self.pairs[variant].receive(self.other, 0)
            return lambda: work.wait().tensors[0]
        request = self.dist.irecv(room, self.other)

        def wait() -> Any:
            request.wait()
            return room

        return wait

    def round_trip(self, variant: str) -> list[Any]:
        wait = self.receive(variant, self.room[0])
        if self.rank == 0:
            sent = self.send(variant, self.data[0])
            received = wait()
        else:
            received = wait()
            sent = self.send(variant, received)
        sent.wait()
        return [received]

    def stream(self, variant: str) -> list[Any]:
        if self.rank == 0:
            answer = self.receive(variant, self.note)
            # All messages are begun before the first one is waited for.
            for sending in [self.send(variant, x) for x in self.data]:
                sending.wait()
            answer()
            return []
        received = [wait() for wait in [self.receive(variant, room) for room in self.room]]
        self.send(variant, self.note).wait()
        return received

    def measure(self, variant: str, pattern: str, batch: int) -> Message:
        """Repeat a pattern.

        Args:
            variant: Name of the variant.
            pattern: Name of the pattern.
            batch: Number of repetitions.

        Returns:
            The seconds of a repetition, and whether the last one was received correctly.
        """
        act = self.round_trip if pattern == "round trip" else self.stream
        # Old values must not pass as received ones.
        for room in self.room:
            room.zero_()
        self.dist.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            received = act(variant)
        seconds = (time.perf_counter() - start) / batch
        return {
            "seconds": seconds,
            "right": all(
                self.torch.equal(tensor, expected)
                for tensor, expected in zip(received, self.data, strict=False)
            ),
        }

    def handle(self, message: Message) -> Message:
        """Answer a message of the coordinator."""
        return self.measure(**message) if "variant" in message else self.prepare(message["nbytes"])


def asking(crew: Crew, variant: str, pattern: str, batch: int) -> Callable[[], float]:
    """Make a function that repeats a pattern, and returns the seconds of the slower process.

    Args:
        crew: The two processes.
        variant: Name of the variant.
        pattern: Name of the pattern.
        batch: Number of repetitions.
    """

    def run() -> float:
        answers = crew.ask(variant=variant, pattern=pattern, batch=batch)
        if not all(answer["right"] for answer in answers):
            raise RuntimeError(
                f"{variant}: a received tensor differs from the sent one ({pattern})"
            )
        return max(answer["seconds"] for answer in answers)

    return run


def compare(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Measure all sizes and patterns. Returns the rows of the table, and all samples."""
    rows, raw = [], {}
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, str(HERE / "pairs.py"), "--serve", folder, "--rank"]
        with Crew("pairs", [[*worker, str(rank)] for rank in range(2)], 2) as crew:
            for size in options.sizes:
                crew.ask(nbytes=SIZES[size])
                for pattern in PATTERNS:
                    # Small messages are repeated more often in a batch.
                    batch = max(
                        4, TOUCHED // (SIZES[size] * (STREAM if pattern == "stream" else 2))
                    )
                    variants = {
                        name: asking(crew, name, pattern, batch) for name in ("gloo", *BARS)
                    }
                    samples = raw[f"{pattern}, {size}"] = interleave(variants, options.rounds)
                    medians = {name: statistics.median(sample) for name, sample in samples.items()}
                    for name, least in BARS.items():
                        seconds = {"gloo": medians["gloo"], name: medians[name]}
                        value = ratio(samples["gloo"], samples[name])
                        rows.append(
                            Row(
                                f"{pattern} of {size}",
                                seconds,
                                f"gloo / {name}",
                                value,
                                least=least,
                            )
                        )
    return rows, raw


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "pairs", rounds=21)
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        default=list(SIZES),
        help="bytes of a tensor (default %(default)s)",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        peer = Peer(options.rank)
        peer.join(options.serve)
        serve(options.rank, peer.handle)
        return
    rows, raw = compare(options)
    are_bars_kept = report("pairs", rows, options, raw)
    sys.exit(0 if are_bars_kept or not options.check else 1)


if __name__ == "__main__":
    main()
