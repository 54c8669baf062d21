"""Faults for tests: what goes wrong between a healthy engine and its clients, asked for by flag or by request.

    {"status": 503, "rate": 0.5}      every second request is answered with an error
    {"stall_after_chunk": 3}          three events of the stream, then nothing, with the connection open
    {"die_before_headers": true}      the process is gone before it answered; {"die_after_chunk": 3}: in mid-stream

`--faults` applies to all requests that compute tokens; with `--allow-faults` a request may bring its own in the header
`x-emulate-fault`, which then replaces those. A *chunk* is one event of a stream, or a whole answer that is no stream;
counts are of chunks that a client got before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
from typing import Any, NoReturn

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicas.emulated.errors import ApiError

FAULT_HEADER = "x-emulate-fault"
FAULTY_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
EXIT_CODE = 70

_ROUNDING = 1e-9
_EVENT = re.compile(rb"(?<=\n\n)")


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds are of the wall clock. `rate`: the share of requests that the rest applies to, spread evenly.

    `error_after_chunk` ends a stream with an error event and no end mark. `gzip`: JSON answers are compressed for
    clients that accept it. `slow_start_s`: /health says 503 for so long after the start; only by flag.
    """

    status: int | None = None
    rate: float = 1.0
    slow_start_s: float = 0.0
    first_byte_delay_s: float = 0.0
    stall_after_chunk: int | None = None
    error_after_chunk: int | None = None
    die_before_headers: bool = False
    die_after_chunk: int | None = None
    byte_per_write: bool = False
    gzip: bool = False

    def __post_init__(self) -> None:
        if self.status is not None and not 400 <= self.status <= 599:
            raise ValueError("status must be an error's, 400 to 599")
        if not 0 <= self.rate <= 1:
            raise ValueError("rate must be within 0..1")
        for name in ("slow_start_s", "first_byte_delay_s", "stall_after_chunk", "error_after_chunk", "die_after_chunk"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must not be negative")


def parse_faults(text: str | bytes) -> Faults:
    """Raises ValueError naming the field."""
    try:
        return msgspec.json.decode(text or b"{}", type=Faults)
    except msgspec.MsgspecError as error:
        raise ValueError(f"faults: {error}") from error


class FaultInjector:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, faults: Faults, *, allow_header: bool) -> None:
        self._app = app
        self._faults = faults
        self._allow_header = allow_header
        self._by_flag = bool(describe(faults).keys() - {"rate", "slow_start_s"})
        self._due = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in FAULTY_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            faults = self._of_request(headers)
        except ValueError as error:
            await _answer(ApiError(400, str(error), FAULT_HEADER), scope, receive, send)
            return
        if faults is None:
            await self._app(scope, receive, send)
        elif faults.die_before_headers:
            _die()
        elif faults.status is not None:
            await asyncio.sleep(faults.first_byte_delay_s)
            await _answer(ApiError(faults.status, "A fault that was asked for."), scope, receive, send)
        else:
            faulty = _FaultyAnswer(faults, receive, send, messages="messages" in scope["path"])
            faulty.compresses = faults.gzip and "gzip" in headers.get("accept-encoding", "")
            # When it is cut, the answer has ended; what the application did for it is aborted on the way.
            with contextlib.suppress(_CutError):
                await self._app(scope, faulty.receive, faulty.send)

    def _of_request(self, headers: Headers) -> Faults | None:
        own = headers.get(FAULT_HEADER) if self._allow_header else None
        if own is not None:
            return parse_faults(own)
        if not self._by_flag:
            return None
        self._due += self._faults.rate
        if self._due < 1.0 - _ROUNDING:
            return None
        self._due -= 1.0
        return self._faults


class _CutError(Exception):
    pass


class _FaultyAnswer:
    """One answer's `receive` and `send`."""

    def __init__(self, faults: Faults, receive: Receive, send: Send, *, messages: bool) -> None:
        self.compresses = False
        self._faults = faults
        self._receive = receive
        self._send = send
        self._messages = messages
        self._gone = asyncio.Event()
        self._chunks = 0
        self._started: Message | None = None
        self._streams = False
        self._compressed: list[bytes] = []

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(self._faults.first_byte_delay_s)
            self._started = message
            content_type = Headers(raw=message["headers"]).get("content-type", "")
            self.compresses &= content_type == "application/json"
            self._streams = content_type.startswith("text/event-stream")
            if not self.compresses:
                await self._send(message)
                await self._after_chunk()
        elif self.compresses:
            await self._compress(message)
        else:
            await self._send_chunks(message)

    async def _send_chunks(self, message: Message) -> None:
        more = message.get("more_body", False)
        chunks = [chunk for chunk in _EVENT.split(message.get("body", b"")) if chunk]
        for chunk in chunks:
            pieces = [chunk[i : i + 1] for i in range(len(chunk))] if self._faults.byte_per_write else [chunk]
            for piece in pieces:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                if self._faults.byte_per_write:
                    await asyncio.sleep(0)
            self._chunks += 1
            await self._after_chunk()
        if not more:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _after_chunk(self) -> None:
        faults = self._faults
        if self._chunks == faults.die_after_chunk:
            _die()
        if self._chunks == faults.stall_after_chunk:
            await self._gone.wait()
            raise _CutError
        if self._chunks == faults.error_after_chunk and self._streams:
            error = ApiError(500, "A fault that was asked for.")
            await self._send({"type": "http.response.body", "body": self._error_event(error), "more_body": False})
            raise _CutError

    def _error_event(self, error: ApiError) -> bytes:
        body = msgspec.json.encode(error.messages_body() if self._messages else error.body())
        return (b"event: error\n" if self._messages else b"") + b"data: " + body + b"\n\n"

    async def _compress(self, message: Message) -> None:
        self._compressed.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        assert self._started is not None
        body = gzip.compress(b"".join(self._compressed))
        headers = [pair for pair in self._started["headers"] if pair[0] != b"content-length"]
        headers += [
            (b"content-encoding", b"gzip"),
            (b"vary", b"accept-encoding"),
            (b"content-length", b"%d" % len(body)),
        ]
        await self._send({**self._started, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)


def _die() -> NoReturn:
    os._exit(EXIT_CODE)


def describe(faults: Faults) -> dict[str, Any]:
    """What isn't as it is by default."""
    return {key: value for key, value in msgspec.structs.asdict(faults).items() if value != getattr(Faults(), key)}
