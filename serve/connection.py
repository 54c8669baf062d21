"""One HTTP/1.1 connection to an engine. Only the framing is taken off, by llhttp; bytes stay as they are.

A protocol of our own and no client library, since this is what every chunk of every answer passes through: the bytes
that arrive in one piece are handed on as one piece, and reading stops while nobody takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, cast

import httptools

from serve.asgi import Headers

Phase = Literal["connect", "sent", "answer"]

_HIGH_WATER = 256 * 1024
_KEPT_S = 4.0
"""How long an idle connection is used again: below the 5 s after which uvicorn, hence vLLM, closes it."""


class UpstreamFailed(Exception):
    """`phase`, how far it came. connect: the engine never saw the request; sent: there is no answer; answer: it broke
    off."""

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase


class Response(asyncio.Protocol):
    """One connection, and the answer to the request that is on it. Header names are as the engine wrote them."""

    def __init__(self, on_lost: Callable[[Response], None]) -> None:
        self.status = 0
        self.headers: Headers = []
        self.idle_since = 0.0
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._size = 0
        self._paused = self._busy = self._surplus = self._keep_alive = False
        self._has_head = self._done = self._interim = self._no_body = self._until_close = False
        self._error: UpstreamFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # an answer that nobody asked for
            self._transport.abort()
            return
        self._heard = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"not HTTP: {error}")
        if self._size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_head and self._until_close and exc is None:
            self._done = True
        self._fail(f"connection lost: {exc}" if exc else "the engine closed the connection")
        self._on_lost(self)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._surplus = self._done

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._surplus:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        self.status = self._parser.get_status_code()
        if 100 <= self.status < 200:
            self._interim = True
            self.headers = []
            return
        names = {name.lower() for name, _ in self.headers}
        self._until_close = not names & {b"content-length", b"transfer-encoding"} and self.status not in (204, 304)
        self._has_head = True
        if self._no_body:
            self._done = True

    def on_body(self, body: bytes) -> None:
        if not self._surplus:
            self._chunks.append(body)
            self._size += len(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self._done = True
            self._keep_alive = self._parser.should_keep_alive()  # it has forgotten when the callback is over

    # What the relay calls.

    def send(self, head: bytes, body: bytes, *, no_body: bool) -> None:
        """Begin an exchange. `no_body`: the answer has none whatever its headers say (HEAD)."""
        self.status, self.headers = 0, []
        self._has_head = self._done = False
        self._no_body, self._busy = no_body, True
        self._heard = self._loop.time()
        self._transport.write(head + body if len(body) < _HIGH_WATER else head)
        if len(body) >= _HIGH_WATER:
            self._transport.write(body)

    async def head(self) -> None:
        """Until status and headers are there. Raises `UpstreamFailed`."""
        while not self._has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """What has arrived since the last call, in one piece; b"" at the end. Raises `UpstreamFailed`."""
        while not self._chunks:
            if self._done:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def fail_when_silent(self, timeout_s: float) -> None:
        """From here on: nothing for so long, while somebody waits for it, is a failure."""
        self._timer = self._loop.call_later(timeout_s, self._check_silence, timeout_s)

    def close(self) -> None:
        """An engine that is still at work sees its client go."""
        self._transport.abort()

    def end(self) -> bool:
        """The exchange is over. True: the connection can be used again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        reusable = (
            self._done
            and not self._chunks
            and not (self._no_body or self._until_close or self._surplus or self._transport.is_closing())
            and self._keep_alive
        )
        self._busy = False
        self.idle_since = self._loop.time()
        return reusable

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing() and self._loop.time() - self.idle_since < _KEPT_S

    def _check_silence(self, timeout_s: float) -> None:
        now = self._loop.time()
        if self._waiter is None:  # nobody waits: it is the client that takes its time
            self._heard = now
        silent = now - self._heard
        if silent >= timeout_s:
            self._timer = None
            self._fail(f"silent for {timeout_s:g} s")
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(timeout_s - silent, self._check_silence, timeout_s)

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = UpstreamFailed(message, "answer" if self._has_head else "sent")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
