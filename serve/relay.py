"""Bytes in, bytes out: one request to an engine, its answer to the client as it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import aiohttp

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
_REQUEST_ONLY = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
_ANSWER_ONLY = _HOP_BY_HOP | {b"date", b"server"}  # the ingress's own HTTP server sets these
_TAIL_BYTES = 4096
_HEALTH_S = 2.0
# OpenAI's name and Anthropic's. A quote within generated text is escaped, so that text can't pass for usage.
_CACHED_TOKENS = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_DONE = b"data: [DONE]\n\n"


class UpstreamFailed(Exception):
    """The engine could not be reached, or broke off. `sent` says whether the client has seen any of the answer, and
    `stream` whether that was an event stream."""

    def __init__(self, message: str, sent: bool, stream: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.stream = stream


class Upstream:
    """One open connection pool to the engines of a fleet."""

    def __init__(self, connect_timeout_s: float) -> None:
        # An engine may think for minutes before its first byte: only connecting is bounded here.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)  # below uvicorn's 5 s: no stale reuse
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, skip_auto_headers=("User-Agent", "Accept")
        )

    async def close(self) -> None:
        await self._session.close()

    async def relay(
        self,
        scope: Scope,
        send: Send,
        url: str,
        body: bytes,
        extra: Headers,
        on_first_chunk: Callable[[], None],
    ) -> tuple[int, int | None]:
        """Status of the answer, and the `cached_tokens` that the engine reported in it, if it did.

        `extra` headers are added to the answer. Raises `UpstreamFailed`; cancelling closes the engine's connection,
        which makes it abort its work.
        """
        target = url + scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        headers = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in _kept(scope["headers"])]
        sent = stream = False
        try:
            async with self._session.request(
                scope["method"], target, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 500 and not await self._healthy(url):
                    raise UpstreamFailed(f"status {response.status} from an engine that is going down", sent=False)
                kept = [pair for pair in response.raw_headers if pair[0].lower() not in _ANSWER_ONLY]
                start = {"type": "http.response.start", "status": response.status, "headers": [*kept, *extra]}
                stream = response.content_type == "text/event-stream"
                tail = b""
                async for chunk in response.content.iter_any():
                    if not sent:
                        await send(start)
                        sent = True
                        if response.status < 400:  # an error means that nothing was computed
                            on_first_chunk()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    tail = chunk if len(chunk) >= _TAIL_BYTES else (tail + chunk)[-_TAIL_BYTES:]
                if not sent:
                    await send(start)
                    sent = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return response.status, _cached_tokens(tail)
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamFailed(f"{type(error).__name__}: {error}", sent, stream) from error

    async def _healthy(self, url: str) -> bool:
        """An error of a healthy engine is the client's to see; that of a dying one is not."""
        try:
            async with asyncio.timeout(_HEALTH_S), self._session.get(f"{url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(key, value) for key, value in headers if key.lower() not in _REQUEST_ONLY]


def _cached_tokens(tail: bytes) -> int | None:
    found = _CACHED_TOKENS.findall(tail)
    return int(found[-1]) if found else None


async def end_broken_stream(send: Send, message: str) -> None:
    """Tell a client in the middle of an event stream that there is no more: the error, then the end mark."""
    error = b'data: {"error": {"message": "%b", "type": "upstream_error", "param": null, "code": 502}}\n\n'
    safe = message.encode("ascii", "replace").replace(b"\\", b"/").replace(b'"', b"'").replace(b"\n", b" ")
    await send({"type": "http.response.body", "body": b"\n\n" + error % safe + _DONE, "more_body": False})
