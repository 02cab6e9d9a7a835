"""Serves the page of a run, and pushes its sections as they change.

    GET /         the page as it is now
    GET /events   server-sent events: `sections`, with the sections that are new to this reader;
                  `end`, when nothing more will come

    folder --look, about once a second, while someone reads--> sections, each with the number of
                                                               the look that changed it
                                                                  | wakes
                              reader A: has all up to 7  <--------+------->  reader B: has up to 3
                              gets 8                                         still busy; gets the
                                                                             newest next

Nothing else is answered, nothing can be changed, and no path of a request reaches the file system.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Protocol

from aiohttp import web

from paceline.cluster import network
from paceline.observe.watch.address import PageGuard

LOOK_INTERVAL: Final = 1.0  # seconds between two looks at the folder
# Seconds after which a reader gets a sign of life if nothing has changed.
KEEP_ALIVE_SECONDS: Final = 15.0
# Seconds in which a reader takes nothing, after which it is disconnected.
STALL_SECONDS: Final = 30.0
MAX_READERS: Final = 256  # readers at once
# A Host header: an IPv6 address in brackets or a name, and a port.
_HOST_HEADER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
# Headers of all answers: nothing is cached, and pages of other sites can't embed or read this one.
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveSource(Protocol):
    """The content of a live page. Its methods are called on a thread, one at a time."""

    def read_sections(self) -> Mapping[str, str]:
        """Return the current sections as HTML, by their ids."""
        ...

    @property
    def layout_key(self) -> str:
        """A value that changes when the whole page has to be loaded again."""
        ...

    def render_document(self) -> str:
        """Return the whole page as it was at the last look. Its script is its last element."""
        ...


class PageServer:
    """Serves one page.

    All methods run on one event loop; only `source` is called on threads. `_look_lock` makes sure
    that one look happens at a time. `_news` wakes the readers when `_look_count` or `_last_words`
    has changed. `_sections` has for each section the number of the look that changed it.

    Args:
        source: Content of the page.
        guard: Readers that are admitted.
        every: Seconds between two looks. Default: 1.
        stalled: Seconds in which a reader has to take something. Default: 30.
    """

    def __init__(
        self,
        source: LiveSource,
        guard: PageGuard,
        *,
        every: float = LOOK_INTERVAL,
        stalled: float = STALL_SECONDS,
    ) -> None:
        self._source, self._guard, self._look_interval, self._stall_seconds = (
            source,
            guard,
            every,
            stalled,
        )
        self._look_count = 0
        self._sections: dict[str, tuple[int, str]] = {}
        self._layout_key = ""
        self._looked_at = -float("inf")
        self._look_lock = asyncio.Lock()
        self._news = asyncio.Condition()
        # Set when a reader has come, so that looking starts again.
        self._wake_up = asyncio.Event()
        self._last_words: str | None = None  # last words to readers, once the page ends
        self.reader_count = 0

    # ---- what is served

    def make_application(self) -> web.Application:
        """Create the application, which looks at the folder while it runs."""
        app = web.Application(middlewares=[self._admit_reader], client_max_size=1024)
        app.router.add_get("/", self._serve_page)
        app.router.add_get("/events", self._serve_events, allow_head=False)
        app.on_response_prepare.append(_add_headers)
        app.cleanup_ctx.append(self._run_look_task)
        return app

    @web.middleware
    async def _admit_reader(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer a request only if its reader is admitted."""
        token = self._guard.token
        if token:
            given_token = request.query.get("token") or request.headers.get(
                "Authorization", ""
            ).removeprefix("Bearer ")
            if not hmac.compare_digest(given_token.encode(errors="replace"), token.encode()):
                return web.Response(
                    status=401,
                    text="open the address that the command has printed, with its token\n",
                )
        # On loopback there is no token, so DNS rebinding has to be prevented: another site could
        # point its own name at this address, and its pages could then read this one.
        elif not network.is_written_as_local(_parse_host_name(request.host)):
            return web.Response(status=403, text="this page is served for localhost\n")
        return await handler(request)

    async def _serve_page(self, request: web.Request) -> web.Response:
        """Serve the page as it is now."""
        await self._look_at_source()
        async with self._look_lock:
            text = await asyncio.to_thread(self._source.render_document)
        # Only the script of this page may run, whatever a run has named. The policy contains its
        # hash.
        policy = f"script-src {_hash_script(text)}; {HEADERS['Content-Security-Policy']}"
        return web.Response(
            text=text, content_type="text/html", headers={"Content-Security-Policy": policy}
        )

    async def _serve_events(self, request: web.Request) -> web.StreamResponse:
        """Serve events to a reader until it leaves, stalls, or nothing more will come."""
        if self.reader_count >= MAX_READERS:
            return web.Response(
                status=503, text=f"{MAX_READERS} readers are connected, and no more are let in\n"
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        )
        self.reader_count += 1
        self._wake_up.set()
        try:
            await response.prepare(request)
            await self._send_sections(response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.reader_count -= 1
        return response

    async def _send_sections(self, response: web.StreamResponse) -> None:
        """Send a reader all sections that are new to it, until nothing more will come."""
        await self._look_at_source()
        seen = 0
        while True:
            text = self._format_changes(seen)
            seen = self._look_count
            await asyncio.wait_for(
                response.write((text or ": nothing new\n\n").encode()), self._stall_seconds
            )
            async with self._news:
                if self._look_count == seen and self._last_words is None:
                    await _wait_for_news(self._news, KEEP_ALIVE_SECONDS)
            if self._look_count == seen and self._last_words is not None:
                await asyncio.wait_for(
                    response.write(_format_event("end", {"words": self._last_words}).encode()),
                    self._stall_seconds,
                )
                return

    def _format_changes(self, seen: int) -> str:
        """Format the sections that have changed since the look number `seen`; empty if none."""
        changed = {name: html for name, (look, html) in self._sections.items() if look > seen}
        return (
            _format_event("sections", {"key": self._layout_key, "changed": changed})
            if changed or not seen
            else ""
        )

    # ---- what is looked at

    async def _run_look_task(self, app: web.Application) -> AsyncIterator[None]:
        """Run the task that looks at the folder, as long as the application runs."""
        task = asyncio.create_task(self._look_while_read())
        yield
        task.cancel()

    async def _look_while_read(self) -> None:
        """Look at the folder again and again while someone reads."""
        while True:
            await self._wake_up.wait()
            self._wake_up.clear()
            while self.reader_count:
                await self._look_at_source(fresh=True)
                await asyncio.sleep(self._look_interval)

    async def _look_at_source(self, *, fresh: bool = False) -> None:
        """Look at the folder.

        Without `fresh` a look that was made just now is enough.
        """
        loop = asyncio.get_running_loop()
        async with self._look_lock:
            if not fresh and loop.time() < self._looked_at + self._look_interval:
                return
            html_by_name = await asyncio.to_thread(self._source.read_sections)
            self._looked_at = loop.time()
            look_number = self._look_count + 1
            old_sections = self._sections
            unchanged = {
                name: old_sections[name]
                for name, html in html_by_name.items()
                if name in old_sections and old_sections[name][1] == html
            }
            # Nothing is new, gone or different, so no reader has to be woken.
            if len(unchanged) == len(html_by_name) == len(old_sections):
                return
            self._sections = {
                name: unchanged.get(name, (look_number, html))
                for name, html in html_by_name.items()
            }
            self._layout_key = self._source.layout_key
            async with self._news:
                self._look_count = look_number
                self._news.notify_all()

    async def end_page(self, words: str) -> None:
        """Look once more, send the result to all readers, and disconnect them with these words."""
        await self._look_at_source(fresh=True)
        async with self._news:
            self._last_words = words
            self._news.notify_all()


async def serve_page(
    server: PageServer, listening: socket.socket, until: Callable[[], Awaitable[str]]
) -> None:
    """Serve a page until `until` returns the last words, which readers still get.

    Args:
        server: The page.
        listening: Socket to serve on.
        until: Returns the last words when the page ends.
    """
    runner = web.AppRunner(
        server.make_application(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=128).start()
        await server.end_page(await until())
        # Readers get two seconds for the last words. One that is connected takes them at once.
        for _ in range(20):
            if not server.reader_count:
                break
            await asyncio.sleep(0.1)
    finally:
        await runner.cleanup()


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of all answers, and remove the name of the server."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)


async def _wait_for_news(news: asyncio.Condition, seconds: float) -> None:
    """Wait for news, at most this long."""
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return


def _format_event(kind: str, data: Mapping[str, object]) -> str:
    """Format a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _hash_script(text: str) -> str:
    """Return the name of the page's script in a Content-Security-Policy: its hash."""
    script = text.rpartition("<script>")[2].rpartition("</script>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _parse_host_name(host: str) -> str:
    """Return the name in a Host header without its port; empty if the header is malformed."""
    match = _HOST_HEADER.fullmatch(host)
    return "" if match is None else match[1] or match[2]
