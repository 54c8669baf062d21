"""HTTP/1.1 to the engines: a pool of kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from urllib.parse import urlsplit

from serve.asgi import Headers
from serve.connection import Response, UpstreamFailed

__all__ = ["Response", "Upstream", "UpstreamFailed"]

_STALE_S = 1.0
"""A kept connection that breaks this soon was closed while it was idle; later on, it broke because of the request."""


class Upstream:
    """The connections of one process to all engines. Any base URL of http or https will do, also with a path."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: defaultdict[str, list[Response]] = defaultdict(list)
        self._open: dict[Response, str] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        for response in list(self._open):
            response.close()
        self._idle.clear()

    @asynccontextmanager
    async def request(
        self, url: str, method: str, path: bytes, headers: Headers, body: bytes = b"", *, resend: bool = True
    ) -> AsyncIterator[Response]:
        """The answer, its head already there. `path`: as on the wire, with its query; `headers` without the framing.

        Leaving before the answer's end closes the connection, which makes an engine abort its work. Raises
        `UpstreamFailed`. A kept connection that the engine closed meanwhile is replaced by a new one; not so with
        `resend=False`: then nothing is ever sent twice, and the connection is always a new one.
        """
        head = _head(url, method, path, headers, len(body))
        response, kept = await self._connection(url, kept=resend)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                response.send(head, body, no_body=method == "HEAD")
                try:
                    await response.head()
                except UpstreamFailed as error:
                    stale = kept and asyncio.get_running_loop().time() - began < _STALE_S
                    if not stale:
                        raise
                    replaced = error
                else:
                    yield response
                    return
            finally:
                self._take_back(response, url)
            try:
                response, kept = await self._connection(url, kept=False)
            except UpstreamFailed as error:
                raise UpstreamFailed(f"{replaced}; then {error}", "sent") from error

    def _take_back(self, response: Response, url: str) -> None:
        if response.end() and response in self._open:
            self._idle[url].append(response)
        else:
            self._open.pop(response, None)
            response.close()

    async def healthy(self, url: str) -> bool:
        """Does /health say 200, within the time for connecting?"""
        try:
            async with asyncio.timeout(self._connect_timeout_s), self.request(url, "GET", b"/health", []) as response:
                return response.status == 200
        except (UpstreamFailed, TimeoutError):
            return False

    async def _connection(self, url: str, *, kept: bool) -> tuple[Response, bool]:
        idle = self._idle[url]
        while idle and kept:
            response = idle.pop()
            if response.usable:
                return response, True
            response.close()
        origin = _origin(url)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, response = await asyncio.get_running_loop().create_connection(
                    lambda: Response(self._lost), origin.host, origin.port, ssl=origin.tls
                )
        except TimeoutError as error:
            raise UpstreamFailed(f"no connection within {self._connect_timeout_s:g} s", "connect") from error
        except OSError as error:
            raise UpstreamFailed(f"{type(error).__name__}: {error}", "connect") from error
        self._open[response] = url
        return response, False

    def _lost(self, response: Response) -> None:
        url = self._open.pop(response, None)
        if url is not None and response in self._idle[url]:
            self._idle[url].remove(response)
        if url is not None and not self._idle[url]:
            del self._idle[url]


class _Origin:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self.netloc = parts.netloc.rpartition("@")[2].encode("latin-1")
        self.path = parts.path.rstrip("/").encode("latin-1")


@lru_cache(maxsize=1024)
def _origin(url: str) -> _Origin:
    return _Origin(url)


def _head(url: str, method: str, path: bytes, headers: Iterable[tuple[bytes, bytes]], size: int) -> bytes:
    origin = _origin(url)
    lines = [method.encode("latin-1") + b" " + origin.path + path + b" HTTP/1.1", b"host: " + origin.netloc]
    lines += [name + b": " + value for name, value in headers]
    if size or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % size)
    return b"\r\n".join(lines) + b"\r\n\r\n"
