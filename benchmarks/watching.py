"""Measures the cost of being watched, for a GPT of 0.9 M under `paceline run --watch`.

    python benchmarks/watching.py [--workers 2] [--steps 80] [--rounds 24]

    silent     the run writes no live.json, and the page isn't open
    alone      the run writes live.json, and the page isn't open
    watched    the run writes live.json, and a reader takes all that the page pushes

All three are the same processes and the same training, and take turns. A round is long enough for
several updates of the page. The server and the reader run on the same cores as the workers. The
benchmark checks that the reader has seen the steps of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from harness import Crew, Message, Row, arguments, interleave, ratio, report, serve

BAR = 1.01  # highest ratio of steps
BATCH = 12  # samples of a step, for each worker


def work(options: argparse.Namespace) -> None:
    """Train on one worker, and answer the coordinator."""
    import time

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl
    from paceline.apps import gpt

    torch.manual_seed(0)
    text = torch.randint(
        gpt.SMALL.vocab, (4096, gpt.SMALL.context + 1), generator=torch.Generator().manual_seed(1)
    )
    with pl.start(
        folder=options.folder, name="run", trace="off", compare=None, total_steps=10**6
    ) as run:
        model = gpt.GPT(gpt.SMALL)
        loader = DataLoader(
            TensorDataset(text[:, :-1], text[:, 1:]), batch_size=BATCH * run.size, drop_last=True
        )
        model, optimizer, loader = run.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader
        )
        # The record that writes live.json is a private part of the run. In rounds without it,
        # writing is replaced by nothing.
        live, update = run._ending._live, run._ending._live.update_file

        def training() -> Any:
            for _ in run.epochs(10**6):
                for x, y in loader:
                    loss = gpt.next_token_loss(model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(loss=loss)
                    yield

        steps = training()

        def handle(message: Message) -> Message:
            live.update_file = update if message["live"] else lambda: None  # type: ignore[method-assign]
            began = time.perf_counter()
            for _ in range(message["steps"]):
                next(steps)
            return {"seconds": time.perf_counter() - began, "steps": run.steps}

        serve(run.rank, handle)
        os._exit(0)  # without the rest of the epochs


class Reader:
    """Reads all that the page pushes, inside of a `with` block.

    Attributes:
        events: Number of events.
        nbytes: Number of bytes.
        seen: Text of the last state.
    """

    def __init__(self, url: str) -> None:
        self._url, self.events, self.nbytes, self.seen = url, 0, 0, ""

    def __enter__(self) -> Reader:
        self._stream = urllib.request.urlopen(f"{self._url}events", timeout=30)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self) -> None:
        try:
            while line := self._stream.readline():
                self.nbytes += len(line)
                if line.startswith(b"data: "):
                    self.events += 1
                    self.seen = json.loads(line[6:])["changed"].get("now", self.seen)
        except (OSError, ValueError, AttributeError):
            return  # the stream was closed

    def __exit__(self, *_: object) -> None:
        # Closing the stream would wait for the thread that reads it. This ends the read.
        sock = self._stream.fp.raw._sock
        sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._stream.close()


def main() -> None:
    parser = arguments(__doc__ or "", "watching", rounds=24)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80, help="steps of a round")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        # Take a free port, and release it for the server of the page.
        port = probe_socket.getsockname()[1]
        probe_socket.close()
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            str(options.workers),
            "--watch",
            str(port),
        ]
        command += [str(Path(__file__).resolve()), f"--folder={folder}"]
        with Crew("watched", [command], options.workers) as crew:
            rows, raw = measure(crew, Reader(f"http://127.0.0.1:{port}/"), options)
    are_bars_kept = report("watching", rows, options, raw)
    sys.exit(1 if options.check and not are_bars_kept else 0)


def measure(
    crew: Crew, reader: Reader, options: argparse.Namespace
) -> tuple[list[Row], dict[str, Any]]:
    """Measure all variants in turn.

    Args:
        crew: The workers.
        reader: Reader of the page.
        options: Arguments of the benchmark.

    Returns:
        Rows of the table, and all samples.
    """

    def steps(live: bool) -> float:
        answers = crew.ask(steps=options.steps, live=live)
        return max(answer["seconds"] for answer in answers) / options.steps

    def watched() -> float:
        before = reader.events
        with reader:
            seconds = steps(True)
        # A reader that has seen nothing would cost nothing.
        if reader.events - before < 2 or "running" not in reader.seen:
            raise SystemExit(
                f"the reader has seen {reader.events - before} changes in a round: "
                f"{reader.seen[:300]}"
            )
        return seconds

    samples = interleave(
        {"silent": lambda: steps(False), "alone": lambda: steps(True), "watched": watched},
        options.rounds,
        warmup=2,
    )
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    what = f"a step of a GPT of 0.9 M, {options.workers} workers"
    rows = [
        Row(
            what, medians, "watched / alone", ratio(samples["watched"], samples["alone"]), most=BAR
        ),
        Row(what, {}, "watched / silent", ratio(samples["watched"], samples["silent"]), most=BAR),
        Row(what, {}, "alone / silent", ratio(samples["alone"], samples["silent"]), most=BAR),
    ]
    return rows, {"samples": samples, "events": reader.events, "bytes": reader.nbytes}


if __name__ == "__main__":
    main()
