"""The process that serves a page: it ends with its input, and Ctrl-C is not for it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from paceline.observe.watch.address import WatchAddress
from tests.harness.jobs import PATIENCE, ROOT


def test_it_lives_as_long_as_its_input() -> None:
    with WatchAddress.parse_address("0", "--watch").open_socket() as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        command = [
            sys.executable,
            "-P",
            "-m",
            "paceline.observe.watch.main",
            str(listening.fileno()),
        ]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            env={"PYTHONPATH": str(ROOT)},
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"token": "secret"}).encode() + b"\n")
            process.stdin.flush()
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url, timeout=PATIENCE)
            process.send_signal(signal.SIGINT)
            with urllib.request.urlopen(f"{url}?token=secret", timeout=PATIENCE) as answer:
                assert answer.status == 200
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
