"""One streamed request, measured as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from serve.loadgen.clock import Clock
from serve.loadgen.types import UNFINISHED, Call, Outcome

_ERROR_BYTES = 2000


class Unreachable(Exception):
    """The endpoint did not say which model it serves; the message is for the user."""


class Target:
    """One endpoint. `call` never raises for what a server does: everything becomes an `Outcome` in `outcomes`.

    `timeout_s` bounds each request, in wall seconds. At most `limit` requests are made in all; the rest is not sent.
    """

    def __init__(
        self, url: str, clock: Clock, *, timeout_s: float = 600.0, limit: int | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.clock = clock
        self.outcomes: list[Outcome] = []
        self.in_flight = 0
        self._started = 0
        self._limit = limit
        self._timeout_s = timeout_s
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            read_bufsize=2**18,
        )

    async def __aenter__(self) -> Target:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def exhausted(self) -> bool:
        return self._limit is not None and self._started >= self._limit

    async def model(self) -> str:
        """The name of the first model that the endpoint serves. Raises `Unreachable`."""
        return str((await self._first_card())["id"])

    async def max_model_len(self) -> int | None:
        """The context length of that model, where the server tells it. Raises `Unreachable`."""
        found = (await self._first_card()).get("max_model_len")
        return found if isinstance(found, int) else None

    async def _first_card(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(30.0), self._session.get(f"{self.url}/v1/models") as response:
                card = (await response.json(content_type=None))["data"][0]
                return {**card, "id": card["id"]}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"nothing answers at {self.url} ({reason}); is the server running?") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Unreachable(f"{self.url}/v1/models names no model; say which with --model") from error

    async def call(self, call: Call) -> Outcome | None:
        """None when the limit is reached. Cancelling records the request as unfinished."""
        if self.exhausted:
            return None
        self._started += 1
        self.in_flight += 1
        outcome = Outcome(self.clock.now(), prompt_tokens=call.prompt_tokens)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(call, outcome)
        except asyncio.CancelledError:
            outcome.error = UNFINISHED
            raise
        except TimeoutError:
            outcome.error = "timeout"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = f"{'broken off: ' if outcome.first_s is not None else ''}{type(error).__name__}"
        finally:
            outcome.ended_s = self.clock.now()
            self.outcomes.append(outcome)
            self.in_flight -= 1
        return outcome

    async def _stream(self, call: Call, outcome: Outcome) -> None:
        async with self._session.post(self.url + call.path, data=call.body) as response:
            _read_headers(response.headers, outcome)
            if response.status != 200:
                text = (await response.content.read(_ERROR_BYTES)).decode("utf-8", "replace")
                outcome.error = f"HTTP {response.status}: {_message(text)}"
                return
            events = EventReader(outcome)
            async for data in response.content.iter_any():
                events.feed(data, self.clock.now())
            events.end()


class EventReader:
    """Server-sent events into an `Outcome`. Only the last of them is decoded: the others are just counted."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._rest = b""
        self._usage = b""
        self._done = False
        self._last_s = 0.0

    def feed(self, data: bytes, now: float) -> None:
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        pieces = sum(map(self._take, events))
        if not pieces:
            return
        self._outcome.pieces += pieces
        if self._outcome.first_s is None:
            self._outcome.first_s = now
        else:
            self._outcome.gaps_s.append(now - self._last_s)
        self._last_s = now

    def end(self) -> None:
        """The stream is over: what it said of itself at the end."""
        outcome = self._outcome
        if outcome.error is None and not self._done:
            outcome.error = "ended without [DONE]"
        usage = _json(self._usage).get("usage") or {}
        outcome.prompt_tokens = usage.get("prompt_tokens", outcome.prompt_tokens)
        outcome.output_tokens = usage.get("completion_tokens", outcome.pieces)
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _take(self, event: bytes) -> bool:
        """Whether this event brought some of the answer."""
        event = event.lstrip(b"\n")
        if not event.startswith(b"data:"):
            return False
        content = event[5:].lstrip()
        if content == b"[DONE]":
            self._done = True
            return False
        if content.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"')):
            self._outcome.error = f"in the stream: {_message(content.decode('utf-8', 'replace'))}"
            return False
        if b'"usage"' in content:
            self._usage = content
        return b'"choices":[]' not in content and b'"choices": []' not in content


def _read_headers(headers: Mapping[str, str], outcome: Outcome) -> None:
    outcome.replica = headers.get("x-whohas-replica")
    predicted = headers.get("x-whohas-predicted-cached-tokens", "")
    outcome.predicted = int(predicted) if predicted.isdecimal() else None
    nominal = headers.get("x-emulated-ttft-s")
    outcome.engine_ttft_s = float(nominal) if nominal else None


def _message(text: str) -> str:
    """A short kind: the error's own type, or the first words of what was answered."""
    error = _json(text.encode()).get("error")
    if isinstance(error, dict):
        text = str(error.get("type") or error.get("message"))
    return text.strip().partition("\n")[0][:60]


def _json(raw: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
