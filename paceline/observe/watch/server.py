"""Serves the page of a run, and pushes its sections as they change.

    GET /         the page as it is now
    GET /events   server-sent events: `sections`, those that are new to this reader; `end`, once
                  nothing more will come

    folder --look, about once a second, while somebody reads--> sections, each with the number of the look that changed it
                                                                  | woken
                              reader A: has all up to 7  <--------+------->  reader B, slow: has all
                                                         up to 3
                                        8 is sent                            still sends; gets the newest next, and nothing in between

Nothing else is answered, nothing can be changed, and no path of a request reaches the file system.
"""  # noqa: E501

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

LOOK: Final = 1.0  # seconds between two looks at the folder
# seconds after which a reader is sent something in any case, so that it knows that it is still
# connected
ALIVE: Final = 15.0
STALLED: Final = 30.0  # seconds in which a reader takes nothing, after which it is let go
READERS: Final = 256  # at once
# an IPv6 address in brackets, or a name; a port
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
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
    """What a page shows; called in a thread of its own, by one at a time."""

    def look(self) -> Mapping[str, str]:
        """Return the sections as they are now, as HTML, by their ids."""
        ...

    @property
    def key(self) -> str:
        """What differs where a page has to be loaded again, and not only some of its sections."""
        ...

    def document(self) -> str:
        """Return the whole page as it was at the last look; its script is the last element that
        it has.
        """
        ...


class PageServer:
    """Serves one page.

    `every`: seconds between two looks; `stalled`: in which a reader has to take something.
    """

    def __init__(
        self, source: LiveSource, guard: PageGuard, *, every: float = LOOK, stalled: float = STALLED
    ) -> None:
        self._source, self._guard, self._every, self._stalled = source, guard, every, stalled
        self._looks = 0
        # the look that has changed each, and its HTML
        self._sections: dict[str, tuple[int, str]] = {}
        self._key = ""
        self._looked = -float("inf")
        self._looking = asyncio.Lock()
        self._news = asyncio.Condition()
        self._poked = asyncio.Event()  # somebody reads, or there is something to look at
        self._end: str | None = None  # the last words
        self.readers = 0

    # ---- what is served

    def application(self) -> web.Application:
        """Return the application, which looks at the folder while it runs."""
        app = web.Application(middlewares=[self._admit], client_max_size=1024)
        app.router.add_get("/", self._page)
        app.router.add_get("/events", self._events, allow_head=False)
        app.on_response_prepare.append(_protect)
        app.cleanup_ctx.append(self._follow)
        return app

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        token = self._guard.token
        if token:
            given = request.query.get("token") or request.headers.get(
                "Authorization", ""
            ).removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
                return web.Response(
                    status=401,
                    text="open the address that the command has printed, with its token\n",
                )
        elif not network.literal(_name(request.host)):
            # a name of somebody else's that leads here: its pages could read this one
            return web.Response(status=403, text="this page is served for localhost\n")
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        await self._look()
        async with self._looking:
            text = await asyncio.to_thread(self._source.document)
        policy = f"script-src {_script(text)}; {HEADERS['Content-Security-Policy']}"
        return web.Response(
            text=text, content_type="text/html", headers={"Content-Security-Policy": policy}
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.readers >= READERS:
            return web.Response(
                status=503, text=f"{READERS} readers are connected, and no more are let in\n"
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        )
        self.readers += 1
        self._poked.set()
        try:
            await response.prepare(request)
            await self._send_all(response)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.readers -= 1
        return response

    async def _send_all(self, response: web.StreamResponse) -> None:
        """Send a reader what is new to it until nothing more will come."""
        await self._look()
        seen = 0
        while True:
            text = self._new_since(seen)
            seen = self._looks
            await asyncio.wait_for(
                response.write((text or ": nothing new\n\n").encode()), self._stalled
            )
            async with self._news:
                if self._looks == seen and self._end is None:
                    await _wait(self._news, ALIVE)
            if self._looks == seen and self._end is not None:
                await asyncio.wait_for(
                    response.write(_event("end", {"words": self._end}).encode()), self._stalled
                )
                return

    def _new_since(self, seen: int) -> str:
        changed = {name: html for name, (look, html) in self._sections.items() if look > seen}
        return (
            _event("sections", {"key": self._key, "changed": changed})
            if changed or not seen
            else ""
        )

    # ---- what is looked at

    async def _follow(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._look_on())
        yield
        task.cancel()

    async def _look_on(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            while self.readers:
                await self._look(fresh=True)
                await asyncio.sleep(self._every)

    async def _look(self, *, fresh: bool = False) -> None:
        """Look at the folder, unless that was done just now and nothing `fresh` is asked for."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if not fresh and loop.time() < self._looked + self._every:
                return
            found = await asyncio.to_thread(self._source.look)
            self._looked = loop.time()
            number = self._looks + 1
            before = self._sections
            kept = {
                name: before[name]
                for name in found
                if name in before and before[name][1] == found[name]
            }
            if len(kept) == len(found) == len(before):
                return
            self._sections, self._key = (
                {name: kept.get(name, (number, html)) for name, html in found.items()},
                self._source.key,
            )
            async with self._news:
                self._looks = number
                self._news.notify_all()

    async def end(self, words: str) -> None:
        """Look a last time, send that to all readers, and let them go with these words."""
        await self._look(fresh=True)
        async with self._news:
            self._end = words
            self._news.notify_all()


async def serve(
    server: PageServer, listening: socket.socket, until: Callable[[], Awaitable[str]]
) -> None:
    """Serve a page on this socket until `until` returns the last words, which readers still get."""
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=128).start()
        await server.end(await until())
        for _ in range(20):  # of a tenth of a second: those that read take it at once
            if not server.readers:
                break
            await asyncio.sleep(0.1)
    finally:
        await runner.cleanup()


async def _protect(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.popall("Server", None)


async def _wait(news: asyncio.Condition, seconds: float) -> None:
    try:
        await asyncio.wait_for(news.wait(), seconds)
    except TimeoutError:
        return


def _event(kind: str, data: Mapping[str, object]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _script(text: str) -> str:
    """Return how a Content-Security-Policy names the script of a page."""
    script = text.rpartition("<script>")[2].rpartition("</script>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _name(host: str) -> str:
    """Return the name in a Host header, without its port; empty for a header that is none."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found[1] or found[2]
