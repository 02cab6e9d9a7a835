"""Messages of float32 tensors between two processes of one host: paceline's pairs against isend and
irecv of Gloo.

Gloo is given every shape beforehand, and receives into tensors that are there already; paceline's
receiver learns the shape from each message, and gets new tensors. Each sample is a batch of one
pattern, in rounds that alternate; what arrives is compared with what was sent.

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
STREAM = 8  # tensors
TOUCHED = 16 << 20  # bytes sent between two looks at the clock, at least
BARS = {"shared memory": 1.0, "TCP": None}  # how many times as fast as Gloo, at least


class Peer:
    """The worker's side: a way to send and a way to receive, for each variant."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.other, self.torch, self.dist = rank, 1 - rank, torch, dist
        self.pairs: dict[str, Any] = {}
        self.count = 0

    def join(self, folder: str) -> None:
        """Meet the other for Gloo, and for both ways of paceline."""
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
        """Data that differ between tensors, and memory that Gloo receives into."""
        torch = self.torch
        self.data = [torch.full((nbytes // 4,), float(number + 1)) for number in range(STREAM)]
        self.room = [torch.zeros(nbytes // 4) for _ in range(STREAM)]
        self.note = torch.zeros(1)
        return {}

    def send(self, variant: str, x: Any) -> Any:
        """Begin to send a tensor."""
        return (
            self.dist.isend(x, self.other)
            if variant == "gloo"
            else self.pairs[variant].send(self.other, 0, {}, [x])
        )

    def receive(self, variant: str, room: Any) -> Callable[[], Any]:
        """Begin to receive a tensor; what is returned waits for it."""
        if variant != "gloo":
            work = self.pairs[variant].receive(self.other, 0)
            return lambda: work.wait().tensors[0]
        asked = self.dist.irecv(room, self.other)

        def wait() -> Any:
            asked.wait()
            return room

        return wait

    def round_trip(self, variant: str) -> list[Any]:
        waiting = self.receive(variant, self.room[0])
        if self.rank == 0:
            sent = self.send(variant, self.data[0])
            found = waiting()
        else:
            found = waiting()
            sent = self.send(variant, found)
        sent.wait()
        return [found]

    def stream(self, variant: str) -> list[Any]:
        if self.rank == 0:
            answer = self.receive(variant, self.note)
            for sent in [self.send(variant, x) for x in self.data]:
                sent.wait()
            answer()
            return []
        found = [wait() for wait in [self.receive(variant, room) for room in self.room]]
        self.send(variant, self.note).wait()
        return found

    def measure(self, variant: str, pattern: str, batch: int) -> Message:
        """Seconds of each repetition of a pattern, and whether the last one brought what was
        sent.
        """
        act = self.round_trip if pattern == "round trip" else self.stream
        for room in self.room:
            room.zero_()
        self.dist.barrier()
        start = time.perf_counter()
        for _ in range(batch):
            found = act(variant)
        seconds = (time.perf_counter() - start) / batch
        return {
            "seconds": seconds,
            "right": all(self.torch.equal(x, y) for x, y in zip(found, self.data, strict=False)),
        }

    def handle(self, message: Message) -> Message:
        """Do what the coordinator asks."""
        return self.measure(**message) if "variant" in message else self.prepare(message["nbytes"])


def asking(crew: Crew, variant: str, pattern: str, batch: int) -> Callable[[], float]:
    """One batch: the seconds of the slower process."""

    def run() -> float:
        answers = crew.ask(variant=variant, pattern=pattern, batch=batch)
        if not all(answer["right"] for answer in answers):
            raise RuntimeError(f"{variant} brought something else than was sent ({pattern})")
        return max(answer["seconds"] for answer in answers)

    return run


def compare(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and every sample."""
    rows, raw = [], {}
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, str(HERE / "pairs.py"), "--serve", folder, "--rank"]
        with Crew("pairs", [[*worker, str(rank)] for rank in range(2)], 2) as crew:
            for size in options.sizes:
                crew.ask(nbytes=SIZES[size])
                for pattern in PATTERNS:
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
    held = report("pairs", rows, options, raw)
    sys.exit(0 if held or not options.check else 1)


if __name__ == "__main__":
    main()
