"""The answer that costs next to nothing, as a raw ASGI application: the stand-in engine and the trivial endpoint.

The headers `x-bench-chunks` (0: one JSON body) and `x-bench-gap-ms` say what to answer, so that no body is parsed; with
`x-bench-mark` every chunk tells that mark and its own number.
"""

from __future__ import annotations

import asyncio
from typing import Any

_USAGE = (
    b'"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001,'
    b'"prompt_tokens_details":{"cached_tokens":0}}'
)
JSON = (
    b'{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":" token"},"logprobs":null,'
    b'"finish_reason":"length","stop_reason":null}],' + _USAGE + b"}"
)
CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
END = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"bench","choices":[],' + _USAGE + b"}\n\ndata: [DONE]\n\n"
)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body, then sends what the headers ask for. The last chunk carries usage and end mark."""
    while (await receive()).get("more_body", False):
        pass
    headers = dict(scope["headers"])
    chunks = int(headers.get(b"x-bench-chunks", b"0"))
    gap_s = float(headers.get(b"x-bench-gap-ms", b"0")) / 1000
    if mark := headers.get(b"x-bench-mark"):
        await _numbered(receive, send, mark, chunks, gap_s)
        return
    if chunks == 0:
        await send_whole(send, JSON, b"application/json")
        return
    start = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": start})
    clock = asyncio.get_running_loop().time
    began = clock()
    for i in range(1, chunks + 1):
        chunk = CHUNK if i < chunks else CHUNK + END
        await send({"type": "http.response.body", "body": chunk, "more_body": i < chunks})
        if i < chunks:
            await asyncio.sleep(max(0.0, began + i * gap_s - clock()))


def numbered(mark: bytes, number: int) -> bytes:
    """An event like no other, with characters of several bytes in it."""
    return b'data: {"mark":"%b","number":%d,"text":"%b"}\n\n' % (mark, number, "北🙂".encode() * (number % 7))


DONE = b"data: [DONE]\n\n"


async def _numbered(receive: Any, send: Any, mark: bytes, chunks: int, gap_s: float) -> None:
    """Ends when the client has gone, as an engine does."""
    gone = asyncio.ensure_future(receive())
    try:
        start = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        for i in range(chunks):
            await send({"type": "http.response.body", "body": numbered(mark, i), "more_body": True})
            await asyncio.wait([gone], timeout=gap_s)
            if gone.done():
                return
        await send({"type": "http.response.body", "body": DONE, "more_body": False})
    finally:
        gone.cancel()


async def send_whole(send: Any, body: bytes, content_type: bytes) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
