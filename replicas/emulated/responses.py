"""A generation as an HTTP response, whole or as server-sent events: one event for each token of each choice.

    engine --on_token--> queue --drained by--> __call__ --send--> client
    client gone (http.disconnect) --> every sequence of the request is aborted, queued or running

Raw ASGI, since a general streaming response would cost more per token than the emulated engine itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from replicas.emulated.api import ApiError, Generation
from replicas.emulated.engine import Engine
from replicas.emulated.scheduler import EngineRequest, State
from replicas.emulated.text import Answer

_encode = msgspec.json.Encoder().encode

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One sequence of a request.

    `echo_text` is the prompt's text where it is to be repeated; `echo_only` hides what is generated behind it.
    """

    index: int
    request: EngineRequest
    answer: Answer
    echo_text: str = ""
    echo_only: bool = False

    @property
    def completion_tokens(self) -> int:
        return 0 if self.echo_only else self.request.num_generated

    def token_text(self, position: int) -> str:
        """Text of the `position`-th generated token, counted from 1; the echo goes before the first."""
        text = "" if self.echo_only else self.answer.texts[position - 1]
        return self.echo_text + text if position == 1 else text

    def whole_text(self) -> str:
        return self.echo_text + ("" if self.echo_only else "".join(self.answer.texts))


class GenerationResponse:
    """Submits its choices when it is called and answers as they proceed."""

    def __init__(
        self, engine: Engine, generation: Generation, response_id: str, choices: Sequence[Choice], num_prompt: int
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._choices = choices
        self._num_prompt = num_prompt
        self._by_request = {choice.request: choice for choice in choices}
        # (choice, how many tokens it has, its finish reason); None ends the response early.
        self._queue: asyncio.Queue[tuple[Choice, int, str | None] | None] = asyncio.Queue()
        self._client_gone = False
        chat = generation.chat
        kind = ("chat.completion.chunk" if generation.stream else "chat.completion") if chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": int(time.time()), "model": generation.model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            for choice in self._choices:
                self._engine.submit(choice.request, self._on_token)
            if self._generation.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            watcher.cancel()
            for choice in self._choices:
                self._engine.abort(choice.request)

    def _on_token(self, request: EngineRequest) -> None:
        if request.state is State.ABORTED:
            self._queue.put_nowait(None)
            return
        reason = request.finish_reason if request.state is State.FINISHED else None
        if reason is not None or self._generation.stream:
            self._queue.put_nowait((self._by_request[request], request.num_generated, reason))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        for choice in self._choices:
            self._engine.abort(choice.request)
        self._queue.put_nowait(None)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        for _ in self._choices:
            if await self._queue.get() is None:
                if not self._client_gone:
                    error = _stopped()
                    await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
                return
        # vLLM reports the cached tokens of a batch's last prompt here, and those of the first one ready in a stream.
        usage = self._usage(cached_of=self._choices[-1])
        body = {**self._head, "choices": [self._whole_choice(choice) for choice in self._choices], "usage": usage}
        await Response(_encode(body), media_type="application/json")(scope, receive, send)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        reason = choice.request.finish_reason
        text = choice.whole_text()
        said: dict[str, Any]
        said = {"message": {"role": "assistant", "content": text}} if self._generation.chat else {"text": text}
        return {"index": choice.index, **said, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    async def _stream(self, send: Send) -> None:
        unfinished = len(self._choices)
        first: Choice | None = None
        while unfinished:
            item = await self._queue.get()
            events = []
            if first is None and item is not None:
                # Headers wait for the first token, so that a client that leaves before it was never answered.
                await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                first = item[0]
                events += self._role_events()
            while item is not None:
                choice, position, reason = item
                events.append(self._event(choice, choice.token_text(position), position, reason))
                unfinished -= reason is not None
                if self._queue.empty():
                    break
                item = self._queue.get_nowait()
            if item is None:
                await self._break_off(send, started=first is not None)
                return
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        assert first is not None
        await send({"type": "http.response.body", "body": self._tail(first), "more_body": False})

    def _role_events(self) -> list[bytes]:
        if not self._generation.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(choice, 0, {"delta": delta}, None) for choice in self._choices]

    def _event(self, choice: Choice, text: str, position: int, reason: str | None) -> bytes:
        said: dict[str, Any] = {"delta": {"content": text}} if self._generation.chat else {"text": text}
        return self._chunk(choice, position, said, reason)

    def _chunk(self, choice: Choice, position: int, said: dict[str, Any], reason: str | None) -> bytes:
        entry = {"index": choice.index, **said, "logprobs": None, "finish_reason": reason}
        chunk = {**self._head, "choices": [entry]}
        if self._generation.continuous_usage:
            chunk["usage"] = _counts(choice.request.num_prompt, 0 if choice.echo_only else position)
        return _sse(chunk)

    def _tail(self, first: Choice) -> bytes:
        if not self._generation.include_usage:
            return _DONE
        return _sse({**self._head, "choices": [], "usage": self._usage(cached_of=first)}) + _DONE

    async def _break_off(self, send: Send, *, started: bool) -> None:
        if self._client_gone:
            return
        error = _stopped()
        if not started:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
        body = _sse(error.body()) if started else _encode(error.body())
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _usage(self, *, cached_of: Choice) -> dict[str, Any]:
        generated = sum(choice.completion_tokens for choice in self._choices)
        usage = _counts(self._num_prompt, generated)
        request = cached_of.request
        details = {"cached_tokens": request.cached_tokens or 0}
        if self._generation.chat:
            size = request.chain.block_size
            details["created_cache_tokens"] = request.num_prompt // size * size - details["cached_tokens"]
        usage["prompt_tokens_details"] = details
        return usage


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _sse(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


def _stopped() -> ApiError:
    return ApiError(500, "The engine stopped before the response was complete.")
