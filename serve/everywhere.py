"""Calls about an engine's cache, which go to every replica's engine. The client gets the worst of their answers.

    client --/reset_prefix_cache--> every engine --answers--> the worst one --> client
                                          '--a request for one token each

vLLM tells of an emptied cache with its next step, and an idle engine takes none: without that request the ownership map
would go on giving credit for what is gone. Whether an engine has these paths is its own decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from serve.asgi import Headers, HTTPError, Scope, Send, path_of, send_whole
from serve.relay import request_headers, target
from serve.running import Candidate
from serve.upstream import Upstream, UpstreamFailed

_DONE: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("POST", "/reset_prefix_cache"): {"success": True},
    ("POST", "/reset_mm_cache"): {},
    ("POST", "/reset_encoder_cache"): {},
    ("POST", "/sleep"): {"status": "sleeping"},
    ("POST", "/wake_up"): {"status": "awake"},
    ("GET", "/is_sleeping"): {"is_sleeping": False},
}
"""What vLLM says where it did what was asked for, or, of the last one, where all is well."""
CALLS = frozenset(_DONE)

_STEPPING = ("/reset_prefix_cache", "/wake_up")
_STEP = b'{"prompt":[0],"max_tokens":1}'
_STEP_S = 10.0
"""A busy engine steps anyway; one that sleeps won't."""


@dataclass(frozen=True, slots=True)
class Told:
    """One engine's answer. `done`: it did what it was asked for."""

    replica: Candidate
    status: int
    content_type: bytes
    body: bytes
    done: bool

    @property
    def goodness(self) -> int:
        return -1 if self.status >= 500 else 0 if self.status >= 300 else 1 + self.done


async def tell_all(
    upstream: Upstream, candidates: Sequence[Candidate], scope: Scope, body: bytes, timeout_s: float
) -> Told:
    """The worst answer. There must be candidates. Raises HTTPError 502 where an engine could not be reached, 504 where
    one did not answer in time; the others were told all the same."""
    servers: dict[str, list[Candidate]] = {}
    for one in candidates:  # data-parallel ranks share a server, which tells all of them
        servers.setdefault(one.url, []).append(one)
    return await worst_of(_tell(upstream, ranks, scope, body, timeout_s) for ranks in servers.values())


async def worst_of(calls: Iterable[Awaitable[Told]]) -> Told:
    """Waits for all of them, whatever becomes of one. Raises what one raised."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return min((one for one in answers if isinstance(one, Told)), key=lambda one: one.goodness)


async def send_told(send: Send, told: Told) -> None:
    whose = (b"x-whohas-replica", told.replica.replica_id.encode())
    await send_whole(send, told.status, told.body, told.content_type, [whose])


async def _tell(upstream: Upstream, ranks: Sequence[Candidate], scope: Scope, body: bytes, timeout_s: float) -> Told:
    path, whose, raw = path_of(scope), ranks[0], bytearray()
    headers = [pair for pair in request_headers(scope["headers"]) if pair[0] != b"accept-encoding"]
    try:
        async with (
            asyncio.timeout(timeout_s),
            upstream.request(whose.url, scope["method"], target(scope), headers, body) as response,
        ):
            while chunk := await response.read():
                raw += chunk
            status = response.status
            content_type = next((value for name, value in response.headers if name.lower() == b"content-type"), b"")
    except UpstreamFailed as error:
        raise HTTPError(502, f"{whose.replica_id}: {error}", "upstream_error", retry_after_s=1) from error
    except TimeoutError as error:
        message = f"{whose.replica_id} did not answer within {timeout_s:g} s"
        raise HTTPError(504, message, "upstream_error", retry_after_s=1) from error
    done = status < 300 and _says(bytes(raw), _DONE[scope["method"], path])
    if done and path in _STEPPING:
        await asyncio.gather(*(_step(upstream, one, headers) for one in ranks))
    return Told(whose, status, content_type, bytes(raw), done)


def _says(body: bytes, expected: Mapping[str, Any]) -> bool:
    """What an engine doesn't say, as older ones don't, counts as said."""
    try:
        told = msgspec.json.decode(body or b"{}")
    except msgspec.DecodeError:
        return True
    return not isinstance(told, dict) or all(told.get(key, value) == value for key, value in expected.items())


async def _step(upstream: Upstream, replica: Candidate, headers: Headers) -> None:
    """Make the engine take a step. Of one that generates no text, or can't just now, there is nothing to be had."""
    own = [pair for pair in headers if pair[0] not in (b"content-type", b"content-encoding")]
    own.append((b"content-type", b"application/json"))
    with contextlib.suppress(UpstreamFailed, TimeoutError):
        async with (
            asyncio.timeout(_STEP_S),
            upstream.request(replica.url, "POST", b"/v1/completions", replica.pin(own), _STEP) as response,
        ):
            while await response.read():
                pass
