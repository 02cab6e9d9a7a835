"""What strangers send: lines, halves of lines and worse, drawn by chance from a seed; and who
sends it.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 31,
    1 << 62,
    1 << 63,
    -(1 << 63),
    1e308,
    "",
    "x",
    "\ud800",
    "é" * 9,
    [],
    {},
    [[]],
    [0, 1 << 62, 1 << 62],
)


def bent(drawn: random.Random, value: Any) -> Any:
    """The same with something else in it somewhere: a number, a list, a name, nothing."""
    if isinstance(value, dict) and value and drawn.random() < 0.9:
        key = drawn.choice(sorted(value, key=str))
        if drawn.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if drawn.random() < 0.1:
            return {**value, str(drawn.choice(ODD)): drawn.choice(ODD)}
        return {**value, key: bent(drawn, value[key])}
    if isinstance(value, list | tuple) and value and drawn.random() < 0.8:
        place = drawn.randrange(len(value))
        rest = [
            *value[:place],
            *([] if drawn.random() < 0.15 else [bent(drawn, value[place])]),
            *value[place + 1 :],
        ]
        return rest + [drawn.choice(ODD)] * (drawn.random() < 0.05)
    return drawn.choice(ODD)


def spoilt(drawn: random.Random, line: bytes) -> bytes:
    """The same, cut, doubled, or with other bytes in it."""
    place = drawn.randrange(len(line) + 1)
    return drawn.choice(
        (
            line[:place],
            line[:place] + drawn.randbytes(drawn.randrange(9)) + line[place + 1 :],
            line + line,
            line[place:],
        )
    )


def line(drawn: random.Random, like: Sequence[dict[str, Any]]) -> bytes:
    """Something to send: often like one of these messages, and never one of them."""
    kind = drawn.randrange(10)
    if kind < 5:
        return json.dumps(bent(drawn, drawn.choice(like))).encode() + b"\n"
    if kind == 5:
        return spoilt(drawn, json.dumps(drawn.choice(like)).encode() + b"\n")
    if kind == 6:
        return drawn.randbytes(drawn.randrange(1, 300)) + b"\n"
    return drawn.choice(
        (
            *(
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                TLS_HELLO,
                b"SSH-2.0-x\r\n",
                b"\n",
                b"\0",
                b"\n" * 3000,
                b"[" * 4000 + b"\n",
            ),
            *(
                b'{"a":' * 700 + b"\n",
                b"x" * 70_000,
                b'{"paceline": 1',
                b"\xff\xfe[\x001\x00]\x00\n",
                b"9" * 4000 + b"\n",
                b"NaN\n",
            ),
            b'{"paceline": 1, "nonce": "\\ud800", "proof": "00"}\n',
        )
    )


def call(point: tuple[str, int], data: bytes, *, rudely: bool = False) -> None:
    """Call, say it, and hang up; again, if nobody takes the call."""
    while True:
        with suppress(OSError), socket.create_connection(point, timeout=60) as connection:
            if rudely:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):  # it may be hung up on before it has said all
                connection.sendall(data)
            return


@contextmanager
def held_open(point: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """So many connections that say nothing."""
    with many_descriptors(count + 300):
        connections: list[socket.socket] = []
        try:
            for _ in range(count):
                with suppress(OSError):
                    connections.append(socket.create_connection(point, timeout=60))
            yield connections
        finally:
            for connection in connections:
                connection.close()


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    """This process may open so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count + 2000, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until(condition: Callable[[], bool], turn: Callable[[], object], seconds: float = 60.0) -> None:
    """Do this until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        turn()


NUMBERS_AND_TEXTS: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        0.5,
        10**9,
        10**18,
        1 << 70,
        10**400,
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        "nan",
        "inf",
        "",
        "x",
    ),
    *(
        "9" * 5000,
        "1e309",
        "\x1b[31m",
        "\ud800",
        "²",
        [],
        {},
        [[]],
        {"a": 1},
        [1] * 5,
        [None],
        {"step": 1},
    ),
]


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a tree, with what it lies in."""
    for key in (
        list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    ):
        yield node, key
        yield from places(node[key])


def made_up(good: dict[str, Any], count: int) -> Iterator[str]:
    """The same with other things in it somewhere, as JSON."""
    draw = random.Random(22)
    for _ in range(count):
        bad = copy.deepcopy(good)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            within, key = draw.choice([*places(bad)] or [(bad, "x")])
            if draw.random() < 0.15:
                within.pop(key)
            else:
                within[key] = copy.deepcopy(draw.choice(NUMBERS_AND_TEXTS))
        yield json.dumps(bad)
