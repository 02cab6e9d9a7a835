"""What is served, to whom, and that readers get what is new: however slow they are, and however
many.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from paceline.observe.watch.address import PageGuard, WatchAddress
from paceline.observe.watch.server import HEADERS, MAX_READERS, PageServer, serve_page

TOKEN = "0123456789abcdef"
PATIENCE = 60.0


class Source:
    """A page with two sections, of which tests change one."""

    def __init__(self) -> None:
        self.found = {"now": "<section id=now>1</section>", "loss": "<section id=loss>a</section>"}
        self.layout_key = "run"
        self.looks = 0

    def read_sections(self) -> dict[str, str]:
        self.looks += 1
        return dict(self.found)

    def render_document(self) -> str:
        return f"<html><script>first()</script>{''.join(self.found.values())}<script>last()</script></html>"  # noqa: E501


def served(
    body: Callable[[TestClient[Any, Any], Source, PageServer], Awaitable[None]],
    *,
    token: str = "",
    **options: Any,
) -> None:
    """Run `body` with a client of a page."""

    async def run() -> None:
        source = Source()
        server = PageServer(source, PageGuard(token), **({"every": 0.01} | options))
        async with TestClient(
            TestServer(server.make_application()), connector=aiohttp.TCPConnector(limit=0)
        ) as client:
            await asyncio.wait_for(body(client, source, server), PATIENCE)

    asyncio.run(run())


async def event(response: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """The next event of a stream; comments are passed over."""
    kind = ""
    while True:
        line = (await response.content.readline()).decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return kind, json.loads(line.removeprefix("data: "))
        else:
            assert not response.content.at_eof() and line[:1] in ("", ":"), line


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# Who may read
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ({}, {}),
        ({"token": ""}, {}),
        ({"token": TOKEN[:-1]}, {}),
        ({"token": TOKEN + "0"}, {}),
        ({"token": "é"}, {}),
        ({}, {"Authorization": "Bearer x"}),
        ({}, {"Cookie": f"token={TOKEN}"}),
    ],
)
def test_without_the_token_nothing_is_answered(
    path: str, query: dict[str, str], headers: dict[str, str]
) -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        answer = await client.get(path, params=query, headers=headers)
        assert answer.status == 401 and "section" not in await answer.text()
        assert source.looks == 0

    served(body, token=TOKEN)


def test_with_it_the_page_is_there() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        for query, headers in (({"token": TOKEN}, {}), ({}, {"Authorization": f"Bearer {TOKEN}"})):
            answer = await client.get("/", params=query, headers=headers)
            assert answer.status == 200 and "<section id=loss>a" in await answer.text()
            stream = await client.get("/events", params=query, headers=headers)
            assert (await event(stream))[0] == "sections"
            stream.close()

    served(body, token=TOKEN)


GOOD = ["localhost", "localhost:80", "127.0.0.1:99", "[::1]:8080", "[::1]"]
EVIL = [
    "evil.example",
    "[::1].evil",
    "[::1]evil:80",
    "localhost:80@evil",
    "localhost:evil",
    "127.0.0.1%evil",
    "[::1%evil]",
    "[::1",
    ":80",
]


@pytest.mark.parametrize(
    ("host", "status"), [*((host, 200) for host in GOOD), *((host, 403) for host in ("", *EVIL))]
)
def test_on_loopback_another_name_that_leads_here_is_refused(host: str, status: int) -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        answer = await client.get("/", headers={"Host": host})
        assert answer.status == status

    served(body)


# What is answered
# --------------------------------------------------------------------------------------------------


def test_headers_are_strict_on_all_answers() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        for method, path, status in (
            ("GET", "/", 200),
            ("GET", "/events", 200),
            ("GET", "/../../etc/passwd", 404),
            ("POST", "/", 405),
        ):
            answer = await client.request(method, path)
            assert answer.status == status
            assert "Server" not in answer.headers
            for name, value in HEADERS.items():
                assert value in answer.headers[name], (path, name)
            answer.close()
        policy = (await client.get("/")).headers["Content-Security-Policy"]
        assert (
            "default-src 'none'" in policy
            and "script-src 'sha256-" in policy
            and "http" not in policy
        )
        assert (
            f"script-src 'sha256-{base64.b64encode(hashlib.sha256(b'last()').digest()).decode()}'"
            in policy
        )

    served(body)


@pytest.mark.parametrize(
    "path", ["/%2e%2e/etc/passwd", "/static/live.js", "/live.json", "/events/x", "/index.html"]
)
def test_no_path_leads_to_a_file(path: str) -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        assert (await client.get(path)).status == 404
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert (await client.request(method, path)).status in (404, 405)

    served(body)


def test_readers_get_what_has_changed_alone() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        stream = await client.get("/events")
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert await event(stream) == ("sections", {"key": "run", "changed": source.found})
        source.found["now"] = "<section id=now>2</section>"
        assert await event(stream) == (
            "sections",
            {"key": "run", "changed": {"now": source.found["now"]}},
        )
        source.layout_key = "another"
        source.found = {"now": "<section id=now>3</section>"}
        assert await event(stream) == ("sections", {"key": "another", "changed": source.found})

    served(body)


def test_nothing_is_looked_at_while_nobody_reads() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        stream = await client.get("/events")
        await event(stream)
        await until(lambda: source.looks > 3)
        stream.close()
        await until(lambda: server.reader_count == 0)
        async with server._look_lock:  # the last look is over
            looks = source.looks
        await asyncio.sleep(0.2)
        assert source.looks == looks
        await event(await client.get("/events"))
        assert source.looks > looks

    served(body)


def test_the_last_words_end_a_stream_after_what_is_new() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        stream = await client.get("/events")
        await event(stream)
        source.found["now"] = "<section id=now>over</section>"
        await server.end_page("it has ended")
        found = await event(stream)
        assert found == ("sections", {"key": "run", "changed": {"now": source.found["now"]}})
        assert await event(stream) == ("end", {"words": "it has ended"})
        assert (await stream.content.read()).strip() == b""
        late = await client.get("/events")  # who comes now gets all, and the same words
        assert (await event(late))[1]["changed"] == source.found
        assert (await event(late))[0] == "end"

    served(body, every=0.01)


# Slow, and many
# --------------------------------------------------------------------------------------------------


async def stalled(client: TestClient[Any, Any]) -> socket.socket:
    """A reader that asks for the stream and takes nothing of it."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(found, (client.host, client.port))
    await loop.sock_sendall(found, b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return found


def test_a_slow_reader_holds_up_nobody_and_is_let_go() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        slow = await stalled(client)
        stream = await client.get("/events", read_bufsize=1 << 26)
        await event(stream)
        assert server.reader_count == 2
        count = 0
        # each look has another megabyte: the slow one is given up once it has taken nothing for
        # long
        while server.reader_count == 2:
            count += 1
            source.found["now"] = f"{count} {'x' * (1 << 20)}"
            kind, news = await event(stream)
            assert kind == "sections" and news["changed"]["now"].startswith(str(count))
        assert server.reader_count == 1
        slow.close()

    served(body, stalled=3.0)


def test_a_hundred_readers_have_all_and_more_than_enough_are_refused() -> None:
    async def body(client: TestClient[Any, Any], source: Source, server: PageServer) -> None:
        streams = [await client.get("/events") for _ in range(MAX_READERS)]
        assert [await event(stream) for stream in streams] == [
            ("sections", {"key": "run", "changed": source.found})
        ] * MAX_READERS
        assert (await client.get("/events")).status == 503
        looks = source.looks
        source.found["now"] = "<section id=now>2</section>"
        assert {json.dumps(await event(stream)) for stream in streams} == {
            json.dumps(("sections", {"key": "run", "changed": {"now": source.found["now"]}}))
        }
        assert source.looks - looks < MAX_READERS  # all read from the same looks
        for stream in streams:
            stream.close()
        await until(lambda: server.reader_count == 0)

    served(body, every=0.05)


def test_served_on_a_socket_until_it_is_over() -> None:
    async def run() -> None:
        listening = WatchAddress.parse_address("0", "--watch").open_socket()
        port, over = listening.getsockname()[1], asyncio.Event()

        async def ending() -> str:
            await over.wait()
            return "over"

        serving = asyncio.create_task(
            serve_page(PageServer(Source(), PageGuard(), every=0.01), listening, ending)
        )
        async with aiohttp.ClientSession() as session:
            stream = await session.get(f"http://127.0.0.1:{port}/events")
            await event(stream)
            over.set()
            assert await event(stream) == ("end", {"words": "over"})
        await asyncio.wait_for(serving, PATIENCE)
        with (
            pytest.raises(OSError, match=r"refused|Connect call failed"),
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            pass

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
