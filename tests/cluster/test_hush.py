"""What torch says of strangers at its store is said once; all else that workers write is shown
as it is.
"""

from __future__ import annotations

import os

import pytest

from paceline.cluster.launcher.output import OutputStream, Screen

COMPLAINT = (
    b"[rank0]:[W1123 06:52:46.058166348 TCPStoreLibUvBackend.cpp:126] [c10d] Error processing "
    b"client message: Invalid string size.\n"
)
STACK = (
    b"Exception raised from read_key at /torch/csrc/distributed/c10d/TCPStoreLibUvBackend.hpp "
    b"(most recent call first):\n"
    + b"".join(
        b"frame #%d: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f in libc10.so)\n" % n
        for n in range(14)
    )
    + b"\n"
)


def shown(*written: bytes) -> tuple[str, str]:
    """What is on the screen when a worker has written that, in pieces; and the last of it."""
    there, here = os.pipe()
    reader, writer = os.pipe()
    for descriptor in (there, reader):
        os.set_blocking(descriptor, False)
    screen = Screen(here)
    stream = OutputStream(0, reader, screen)
    found = b""
    for piece in written:
        os.write(writer, piece)
        while stream.read_output():
            pass
        while screen.has_pending:
            screen.write_pending()
            found += os.read(there, 1 << 16)
    tail = stream.get_tail()
    stream.close()
    for descriptor in (there, here, writer):
        os.close(descriptor)
    return found.decode(), tail


@pytest.mark.parametrize("step", [7, 1000, 1 << 15])
def test_strangers_at_the_store_are_told_of_once(step: int) -> None:
    all_of_it = (COMPLAINT + STACK) * 20 + b"ValueError: boom\n"
    text, tail = shown(*(all_of_it[at : at + step] for at in range(0, len(all_of_it), step)))
    first, last = text.splitlines()
    assert (
        first.startswith("[0] [rank0]:[W1123")
        and "more of the kind is not shown" in first
        and last == "[0] ValueError: boom"
    )
    assert tail.splitlines()[-1] == "ValueError: boom" and len(tail.splitlines()) == 2


def test_other_stacks_and_blank_lines_are_shown() -> None:
    kept = b"\n[W1123 TCPStore.cpp:106] recvValue failed\n" + STACK + b"\n\nframe #0: mine\n"
    text, tail = shown(kept)
    assert text == "".join(f"[0] {line}" for line in kept.decode().splitlines(keepends=True))
    assert tail == kept.decode()


def test_lines_of_others_between_them_are_shown() -> None:
    lines = STACK.splitlines(keepends=True)
    text, _ = shown(COMPLAINT, *lines[:5], b"epoch 1\n", *lines[5:], b"frame #1 of my film\n\n")
    assert text.splitlines()[1:] == ["[0] epoch 1", "[0] frame #1 of my film", "[0] "]
