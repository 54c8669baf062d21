"""Several models behind one front: each request goes to the front of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from router.errors import InvalidRequest
from serve.asgi import (
    HTTPError,
    Message,
    Receive,
    Scope,
    Send,
    path_of,
    read_body,
    send_error,
    send_json,
    send_whole,
)
from serve.config import IngressSection
from serve.everywhere import CALLS, send_told, worst_of
from serve.front import Exposition, Front, parsed
from serve.metrics import EXPOSITION, Metrics
from serve.models import MODELS_PATH

_WORST_FIRST = ("unready", "degraded", "ok")


class ByModel:
    """An ASGI application. `fronts`: by what clients call a model or adapter; the first one is for what names none."""

    def __init__(
        self, fronts: Mapping[str, Front], metrics: Metrics, exposition: Exposition, limits: IngressSection
    ) -> None:
        self._fronts = fronts
        self._first = next(iter(fronts.values()))
        self._each: dict[Front, str] = {}  # under the name of its model, which comes before those of its adapters
        for name, front in fronts.items():
            self._each.setdefault(front, name)
        self._metrics = metrics
        self._exposition = exposition
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = path_of(scope), scope.get("method")
        try:
            if path == "/health" and method in ("GET", "HEAD"):
                health = await self._health()
                await send_json(send, 200 if health["ready"] else 503, health)
            elif path == "/metrics" and method == "GET":
                self._metrics.observe_fleets([front.state() for front in self._each])
                await send_whole(send, 200, await self._exposition.text(), EXPOSITION)
            elif path == MODELS_PATH and method == "GET":
                await self._models(scope, send)
            elif path.startswith(f"{MODELS_PATH}/"):
                await self._named(path.removeprefix(f"{MODELS_PATH}/"))(scope, receive, send)
            elif (method, path) in CALLS:
                await self._tell_all(scope, receive, send)
            elif method == "POST":
                raw = await read_body(receive, self._limits.max_body_bytes, self._limits.idle_timeout_s)
                await self._named(_model(scope, raw))(scope, _again(raw, receive), send)
            else:
                await self._first(scope, receive, send)
        except HTTPError as error:
            self._metrics.requests.labels(error.status).inc()
            await send_error(send, path, error)

    def _named(self, name: str | None) -> Front:
        if not name:
            return self._first
        if name not in self._fronts:
            raise HTTPError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")
        return self._fronts[name]

    async def _health(self) -> dict[str, Any]:
        """Ready when every model is; else as bad as the worst."""
        told = await asyncio.gather(*(front.health() for front in self._each))
        status = next(status for status in _WORST_FIRST if any(one["status"] == status for one in told))
        ready = all(one["ready"] for one in told)
        return {"status": status, "ready": ready, "models": dict(zip(self._each.values(), told, strict=True))}

    async def _tell_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`?model=` says whose engines; otherwise those of all models."""
        raw = await read_body(receive, self._limits.max_body_bytes, self._limits.idle_timeout_s)
        name = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("model")
        fronts = [self._named(name)] if name else self._each
        told = await worst_of(front.tell_all(scope, raw) for front in fronts)
        self._metrics.requests.labels(told.status).inc()
        await send_told(send, told)

    async def _models(self, scope: Scope, send: Send) -> None:
        lists = await asyncio.gather(*(_cards(front, scope) for front in self._each))
        if all(cards is None for cards in lists):
            raise HTTPError(502, "no replica could be reached", "upstream_error", retry_after_s=1)
        self._metrics.requests.labels(200).inc()
        await send_json(send, 200, {"object": "list", "data": [card for cards in lists for card in cards or ()]})


async def _cards(front: Front, scope: Scope) -> list[dict[str, Any]] | None:
    try:
        return await front.models(scope)
    except HTTPError:  # a model without replicas hides no other one
        return None


def _model(scope: Scope, raw: bytes) -> str | None:
    """The model that a body names. What is no JSON object names none: the engine, or the front, says what it is."""
    try:
        name = parsed(scope, raw).get("model")
    except InvalidRequest:
        return None
    return name if isinstance(name, str) else None


def _again(raw: bytes, receive: Receive) -> Receive:
    """`receive` as if nothing had been read."""
    read = False

    async def once_more() -> Message:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return once_more
