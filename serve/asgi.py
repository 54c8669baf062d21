"""What the front needs of ASGI: its types, whole bodies in and out, and errors in the shapes that clients know."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from router.api_forms import COUNT_TOKENS_PATH, MESSAGES_PATH

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_ANTHROPIC_PATHS = (MESSAGES_PATH, COUNT_TOKENS_PATH)


class HTTPError(Exception):
    """An answer of our own. `kind` and `param` as in OpenAI's errors; `retry_after_s` 0: no such header."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


def path_of(scope: Scope) -> str:
    """The path below where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def read_body(receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises HTTPError 413 above `limit` bytes and 408 when it takes longer than `timeout_s`."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise asyncio.CancelledError
                part = message.get("body", b"")
                size += len(part)
                if size <= limit:
                    parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        message_ = f"the body was not there after {timeout_s:g} s"
        raise HTTPError(408, message_, "invalid_request_error") from error
    if size > limit:  # read to the end first: a client that is still sending would not see the answer
        raise HTTPError(413, f"the body has {size} bytes; at most {limit} are taken", "invalid_request_error")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_whole(send: Send, status: int, body: bytes, content_type: bytes, extra: Headers | None = None) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_json(send: Send, status: int, value: Any, extra: Headers | None = None) -> None:
    await send_whole(send, status, msgspec.json.encode(value), b"application/json", extra)


async def send_error(send: Send, path: str, error: HTTPError) -> None:
    body: dict[str, Any] = {
        "error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}
    }
    if path in _ANTHROPIC_PATHS:
        body = {"type": "error", **body}
    extra = [(b"retry-after", b"%d" % error.retry_after_s)] if error.retry_after_s else None
    await send_json(send, error.status, body, extra)


def error_event(path: str, message: str) -> bytes:
    """An event that tells a client in the middle of a stream that there is no more, in the words of its API."""
    error = {"message": message, "type": "upstream_error", "param": None, "code": 502}
    if path == "/v1/responses":
        body: dict[str, Any] = {"type": "error", "code": "upstream_error", "message": message, "error": error}
    elif path in _ANTHROPIC_PATHS:
        body = {"type": "error", "error": {"type": "api_error", "message": message}}
    else:
        return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
