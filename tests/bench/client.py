"""HTTP clients that cost little: one request after the other on one connection, and many paced streams at once."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self
from urllib.parse import urlsplit

from tests.bench.answers import CHUNK

CHAT = "/v1/chat/completions"
_TIMEOUT_S = 60.0


class BadAnswer(RuntimeError):
    """Anything but 200 and a whole answer: there is nothing to measure then."""


def head(url: str, size: int, chunks: int = 0, gap_ms: float = 0.0, close: bool = False) -> bytes:
    parts = urlsplit(url)
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        f"content-length: {size}",
        f"x-bench-chunks: {chunks}",
        f"x-bench-gap-ms: {gap_ms}",
        *(["connection: close"] if close else []),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection:
    """One kept-alive connection to the server of `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def post(self, body: bytes) -> float:
        """Milliseconds from the first byte sent to the last one of the answer. Raises `BadAnswer`."""
        request = head(self._url, len(body)) + body
        began = time.perf_counter()
        self._socket.sendall(request)
        answer = self._answer()
        took = (time.perf_counter() - began) * 1000
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BadAnswer(f"{self._url}: {answer[:500]!r}")
        return took

    def _answer(self) -> bytes:
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        top, _, rest = answer.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b":", 1) for line in top.split(b"\r\n")[1:])
        if b"content-length" in fields:
            while len(rest) < int(fields[b"content-length"]):
                rest += self._more()
        else:
            while not rest.endswith(b"0\r\n\r\n"):
                rest += self._more()
        return top + rest

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise BadAnswer(f"{self._url} closed the connection")
        return data


@dataclass(frozen=True, slots=True)
class Stream:
    """Milliseconds to the first byte of the answer's body, and milliseconds between what arrived."""

    ttft_ms: float
    gaps_ms: Sequence[float]


async def stream(url: str, body: bytes, chunks: int, gap_ms: float) -> Stream:
    """One streamed answer on a connection of its own. Raises `BadAnswer`."""
    parts = urlsplit(url)
    began = time.perf_counter()
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(head(url, len(body), chunks, gap_ms, close=True) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise BadAnswer(f"{url}: {answer + await reader.read(500)!r}")
            times, content = [], b""
            while data := await reader.read(1 << 16):
                times.append((time.perf_counter() - began) * 1000)
                content += data
        finally:
            writer.close()
    if content.count(CHUNK) != chunks:
        raise BadAnswer(f"{url}: {content.count(CHUNK)} chunks, not {chunks}")
    return Stream(times[0], [later - earlier for earlier, later in pairwise(times)])


async def streams(url: str, bodies: Sequence[bytes], chunks: int, gap_ms: float) -> list[Stream]:
    """All at once, each a little later than the one before, so that their chunks don't come in step."""

    async def one(i: int, body: bytes) -> Stream:
        await asyncio.sleep(i * max(gap_ms, 10.0) / 1000 / len(bodies))
        return await stream(url, body, chunks, gap_ms)

    return await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies)))
