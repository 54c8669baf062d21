"""An engine that does to the letter what a test asks for, down to the single write on its socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request at an engine, and the means to answer it. Header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    raw_headers: list[tuple[str, str]] = field(default_factory=list)
    reusable: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def stream(self, *chunks: bytes) -> None:
        """The beginning of an event stream: head and chunks."""
        await self.head(content_type="text/event-stream; charset=utf-8", transfer_encoding="chunked")
        for chunk in chunks:
            await self.chunk(chunk)

    async def end(self) -> None:
        await self.write(b"0\r\n\r\n")
        self.reusable = True

    async def whole(self, body: bytes, status: int = 200, **headers: str) -> None:
        fields = {"content_type": "application/json", **headers}
        await self.head(status, **fields, content_length=str(len(body)))
        await self.write(body)
        self.reusable = True

    async def error(self, status: int, message: str = "no") -> None:
        await self.whole(json.dumps({"error": {"message": message, "code": status}}).encode(), status)

    def die(self) -> None:
        """The connection is cut, as when the process is killed."""
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


def event(text: str, **fields: Any) -> bytes:
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo-model", **fields}
    body.setdefault("choices", [{"index": 0, "delta": {"content": text}, "finish_reason": None}])
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage(cached: int, **fields: Any) -> bytes:
    """The last event of a stream with `include_usage`."""
    counted = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}}
    return event("", choices=[], usage=counted, **fields)


async def answer(exchange: Exchange) -> None:
    """What a healthy engine does, in short."""
    if exchange.target == "/health":
        await exchange.whole(b"")
    elif exchange.target == "/v1/models":
        await exchange.whole(b'{"object":"list","data":[{"id":"demo-model","object":"model"}]}')
    elif re.search(rb'"stream":\s*true', exchange.body):
        await exchange.stream(event("one"), event("two"), usage(16), DONE)
        await exchange.end()
    else:
        told = {"prompt_tokens": 40, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
        message = {"role": "assistant", "content": "fine"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "demo-model", "choices": [choice]}
        await exchange.whole(json.dumps({**body, "usage": told}).encode())


async def for_ever(exchange: Exchange) -> None:
    """Accepts, and never answers."""
    await asyncio.Event().wait()


def healthy_but(script: Script) -> Script:
    """`script`, for all but /health and /v1/models."""

    async def run(exchange: Exchange) -> None:
        await (answer if exchange.target in ("/health", "/v1/models") else script)(exchange)

    return run


class ScriptedEngine:
    """`running`: requests in hand. `aborted`: those whose client left before their end."""

    def __init__(self, script: Script = answer) -> None:
        self.script = script
        self.exchanges: list[Exchange] = []
        self.running = self.aborted = self.connections = 0
        self._port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def generations(self) -> list[Exchange]:
        return [one for one in self.exchanges if one.method == "POST"]

    async def start(self) -> None:
        """Listens, after a `kill` on the same port as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Nobody listens any more, and every connection is cut."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in head[1:-2])]
        headers = dict(pairs)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        exchange = Exchange(method, target, headers, body, writer, pairs)
        self.exchanges.append(exchange)
        self.running += 1
        work = asyncio.ensure_future(self.script(exchange))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.aborted += 1
            else:
                await work
        finally:
            self.running -= 1
            for one in (work, gone):
                one.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        return exchange.reusable


@contextlib.asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[list[ScriptedEngine]]:
    engines = [ScriptedEngine(script) for script in scripts]
    try:
        for one in engines:
            await one.start()
        yield engines
    finally:
        for one in engines:
            await one.kill()
