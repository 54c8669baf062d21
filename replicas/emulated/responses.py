"""A generation as an HTTP response, whole or as server-sent events: one event for each token of each choice.

    engine --on_token--> queue --drained by--> __call__ --form--> bytes --send--> client
    client gone (http.disconnect) --> every sequence of the request is aborted, queued or running

Raw ASGI, since a general streaming response would cost more per token than the emulated engine itself.
"""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from replicas.emulated.choices import Choice
from replicas.emulated.engine import Engine
from replicas.emulated.errors import ApiError
from replicas.emulated.forms import Form, Reply, encode
from replicas.emulated.scheduler import EngineRequest, State

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class GenerationResponse:
    """Submits its choices when it is called and answers as they proceed."""

    def __init__(self, engine: Engine, reply: Reply, form: Form) -> None:
        self._engine = engine
        self._form = form
        self._choices = reply.choices
        self._streams = reply.generation.stream
        self._by_request = {choice.request: choice for choice in reply.choices}
        # (choice, how many tokens it has, whether these are all); None ends the response early.
        self._queue: asyncio.Queue[tuple[Choice, int, bool] | None] = asyncio.Queue()
        self._client_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            for choice in self._choices:
                self._engine.submit(choice.request, self._on_token)
            if self._streams:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        finally:
            watcher.cancel()
            for choice in self._choices:
                self._engine.abort(choice.request)

    def _on_token(self, request: EngineRequest) -> None:
        if request.state is State.ABORTED:
            if self._engine.stopped or self._streams:
                self._queue.put_nowait(None)
                return
            # Put to sleep: what there is of the answer is all there will be.
            request.finish_reason = "abort"
        last = request.state is not State.RUNNING
        if last or self._streams:
            self._queue.put_nowait((self._by_request[request], request.num_generated, last))

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
        answer = Response(encode(self._form.whole()), media_type="application/json")
        await answer(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        unfinished = len(self._choices)
        first: Choice | None = None
        while unfinished:
            item = await self._queue.get()
            events = []
            if first is None and item is not None:
                # Headers wait for the first token, so that a client that leaves before it was never answered.
                first = item[0]
                headers = [*_SSE_HEADERS, _nominal_ttft(first.request)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                events += self._form.begin()
            while item is not None:
                choice, position, last = item
                events.append(self._form.token(choice, position, last=last))
                unfinished -= last
                if self._queue.empty():
                    break
                item = self._queue.get_nowait()
            if item is None:
                await self._break_off(send, started=first is not None)
                return
            if shown := b"".join(events):
                await send({"type": "http.response.body", "body": shown, "more_body": True})
        assert first is not None
        await send({"type": "http.response.body", "body": self._form.end(first), "more_body": False})

    async def _break_off(self, send: Send, *, started: bool) -> None:
        if self._client_gone:
            return
        error = _stopped()
        if not started:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
        body = self._form.error_event(error) if started else encode(error.body())
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _nominal_ttft(request: EngineRequest) -> tuple[bytes, bytes]:
    """Simulated seconds to the first token: what a client measures beyond them is HTTP, routing and a busy machine."""
    assert request.first_token_at is not None
    return b"x-emulated-ttft-s", f"{request.first_token_at - request.arrival:.6f}".encode()


def _stopped() -> ApiError:
    return ApiError(500, "The engine ended the request before the response was complete.")
