"""Bytes in, bytes out: one request to an engine, its answer to the client as it comes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from serve.asgi import Headers, Scope, Send, error_event
from serve.upstream import Response

_HOP_BY_HOP = frozenset(
    {
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
)
_REQUEST_ONLY = _HOP_BY_HOP | {b"host", b"content-length", b"expect"}
# The ingress's own HTTP server sets these, Ray Serve the request id.
_ANSWER_ONLY = _HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
_MAGIC = {b"gzip": b"\x1f\x8b", b"x-gzip": b"\x1f\x8b", b"zstd": b"\x28\xb5\x2f\xfd"}
_TAIL_BYTES = 4096
# OpenAI's name and Anthropic's. A quote within generated text is escaped, so that text can't pass for usage.
_CACHED_TOKENS = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Answer:
    """What the client has seen of its answer. `status` 0: nothing yet. `stream`: events. `cached_tokens`: as the engine
    reported them, where it did."""

    status: int = 0
    stream: bool = False
    cached_tokens: int | None = None


async def relay(
    response: Response, send: Send, answer: Answer, extra: Headers, on_first_chunk: Callable[[], None]
) -> None:
    """Hand the answer on, with `extra` headers. Raises `UpstreamFailed`; `answer` tells how far it came."""
    chunk = await response.read()  # first: what breaks before its first byte can still be tried elsewhere
    headers = answer_headers(response.headers, chunk)
    if response.status < 400:  # an error means that nothing was computed
        on_first_chunk()
    answer.stream = is_event_stream(headers)
    answer.status = response.status
    await send({"type": "http.response.start", "status": response.status, "headers": [*headers, *extra]})
    tail = b""
    while chunk:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        tail = chunk if len(chunk) >= _TAIL_BYTES else (tail + chunk)[-_TAIL_BYTES:]
        chunk = await response.read()
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    answer.cached_tokens = _cached_tokens(tail)


def target(scope: Scope) -> bytes:
    """Path and query as the client wrote them, below where the application is mounted."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path = raw.removeprefix(scope.get("root_path", "").encode())
    return path + b"?" + scope["query_string"] if scope["query_string"] else path


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """What goes on to the engine. A request id and a trace context are made where the client sent none."""
    kept = _end_to_end(headers, _REQUEST_ONLY)
    names = {name for name, _ in kept}
    if b"x-request-id" not in names:
        kept.append((b"x-request-id", secrets.token_hex(16).encode()))
    if b"traceparent" not in names:
        kept.append((b"traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01".encode()))
    return kept


def answer_headers(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> Headers:
    """What goes back to the client. A content coding that the first bytes of the body belie is left out."""
    kept = _end_to_end(headers, _ANSWER_ONLY)
    coding = next((value.strip().lower() for name, value in kept if name == b"content-encoding"), None)
    if coding in _MAGIC and body and not body.startswith(_MAGIC[coding][: len(body)]):
        kept = [pair for pair in kept if pair[0] != b"content-encoding"]
    return kept


def is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    kept, named = [], b""
    for key, value in headers:
        name = key.lower()
        if name == b"connection":
            named += value.lower() + b","
        if name not in dropped:
            kept.append((name, value))
    if not named:
        return kept
    also = {name.strip() for name in named.split(b",")}  # hop-by-hop by their sender's own word
    return [pair for pair in kept if pair[0] not in also]


def _cached_tokens(tail: bytes) -> int | None:
    found = _CACHED_TOKENS.findall(tail)
    return int(found[-1]) if found else None


async def end_broken_stream(send: Send, path: str, message: str) -> None:
    """Tell a client in the middle of an event stream that there is no more: the error, then the end mark."""
    body = b"\n\n" + error_event(path, message) + _DONE
    await send({"type": "http.response.body", "body": body, "more_body": False})
