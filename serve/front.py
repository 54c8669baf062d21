"""The HTTP front: admit, parse once, hand over to the dispatcher. Raw ASGI, without Ray.

Every path of the engine's API is relayed as bytes, to one engine or, where it is about their caches, to all; whohas
answers itself only for `/health`, `/metrics`, `/explain` and the list of models. Cancelling a call is how its client's
leaving is told.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any, Protocol

from router.asked import Asked
from router.errors import InvalidRequest
from router.prompt import parse_body
from router.router import Router
from router.types import Decision
from serve.asgi import HTTPError, Receive, Scope, Send, path_of, read_body, send_error, send_json, send_whole
from serve.config import IngressSection
from serve.dispatch import Dispatcher, Fleet, Pick
from serve.everywhere import CALLS, Told, send_told, tell_all
from serve.metrics import EXPOSITION, FleetState, Metrics
from serve.models import MODELS_PATH, merged_models
from serve.relay import request_headers
from serve.session_hint import session_hint
from serve.upstream import Upstream

GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
_ENGINE_PATHS = frozenset({"/tokenize", "/detokenize", "/version", "/load"})

_PARSED = "whohas.body"

logger = logging.getLogger("whohas.ingress")


def parsed(scope: Scope, raw: bytes) -> dict[str, Any]:
    """The request's body, parsed once however many parts of the front look into it. Raises `InvalidRequest`."""
    body: dict[str, Any] | None = scope.get(_PARSED)
    if body is None:
        body = scope[_PARSED] = parse_body(raw)
    return body


class Exposition(Protocol):
    """Where `/metrics` comes from."""

    async def text(self) -> bytes: ...


class Front:
    """An ASGI application; `close` ends what it started itself, which is not what it was given."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        exposition: Exposition,
        limits: IngressSection,
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._exposition = exposition
        self._limits = limits
        self._dispatcher = Dispatcher(router, fleet, upstream, metrics, limits)

    async def close(self) -> None:
        await self._dispatcher.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "whohas speaks HTTP only"})
            return
        path = path_of(scope)
        try:
            await self._route(path, scope, receive, send)
        except HTTPError as error:
            self._metrics.requests.labels(error.status).inc()
            await send_error(send, path, error)

    async def _route(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.max_header_bytes:
            limit = self._limits.max_header_bytes
            raise HTTPError(431, f"the headers have more than {limit} bytes", "invalid_request_error")
        if path == "/health" and method in ("GET", "HEAD"):
            health = await self.health()
            await send_json(send, 200 if health["ready"] else 503, health)
        elif path == "/metrics" and method == "GET":
            self._metrics.observe_fleets([self.state()])
            await send_whole(send, 200, await self._exposition.text(), EXPOSITION)
        elif path == "/explain" and method == "POST":
            await self._explain(scope, await self._body(receive), send)
        elif path == MODELS_PATH and method == "GET":
            await self._models(scope, send)
        elif (method, path) in CALLS:
            told = await self.tell_all(scope, await self._body(receive))
            self._metrics.requests.labels(told.status).inc()
            await send_told(send, told)
        elif path.startswith("/v1/") or path in GENERATION_PATHS or path in _ENGINE_PATHS:
            await self._serve(path, scope, await self._body(receive), send)
        else:
            raise HTTPError(404, f"no such path: {method} {path}", "not_found_error")

    async def _body(self, receive: Receive) -> bytes:
        return await read_body(receive, self._limits.max_body_bytes, self._limits.idle_timeout_s)

    async def _serve(self, path: str, scope: Scope, raw: bytes, send: Send) -> None:
        started = time.perf_counter()
        generates = scope["method"] == "POST" and path in GENERATION_PATHS
        asked = await self._asked(path, scope, raw) if generates else Asked(0)
        await self._dispatcher.dispatch(scope, raw, send, asked, generates=generates, started=started)

    async def _asked(self, path: str, scope: Scope, raw: bytes) -> Asked:
        try:
            body = parsed(scope, raw)
            asked = await self._router.look_up(path, body, len(raw))
        except InvalidRequest as error:
            raise HTTPError(400, str(error), "invalid_request_error", error.param) from error
        if asked.note:
            self._metrics.by_load.labels(asked.note.partition(":")[0]).inc()
        session = session_hint(scope["headers"], body)
        return replace(asked, session=session) if session else asked

    async def health(self) -> dict[str, Any]:
        """Live: it answers. Ready: a replica is there. Degraded: it routes by load, and why."""
        ready = bool(self._fleet.candidates()) or await self._anyone()
        router = self._router
        doubts = {one.replica_id: one.doubt for one in router.fleet.replicas.values() if one.doubt}
        status = "unready" if not ready else "degraded" if router.degraded or doubts else "ok"
        return {
            "status": status,
            "ready": ready,
            "degraded": router.degraded,
            "replicas": len(self._fleet.candidates()),
            "replicas_in_map": len(router.fleet.replicas),
            "left_out": self._dispatcher.left_out,
            "doubts": doubts,
        }

    def state(self) -> FleetState:
        """For the gauges of `/metrics`."""
        router = self._router
        return FleetState(router.fleet, router.trust(), bool(router.degraded), len(self._dispatcher.left_out))

    async def tell_all(self, scope: Scope, body: bytes) -> Told:
        """One of `CALLS`, to every engine. Raises HTTPError."""
        await self._until_known()
        return await tell_all(self._upstream, self._fleet.candidates(), scope, body, self._limits.total_timeout_s)

    async def models(self, scope: Scope) -> list[dict[str, Any]] | None:
        """The cards of `/v1/models`; None when no replica answers."""
        await self._until_known()
        headers = [pair for pair in request_headers(scope["headers"]) if pair[0] != b"accept-encoding"]
        candidates, timeout_s = self._fleet.candidates(), self._limits.connect_timeout_s
        return await merged_models(self._upstream, candidates, headers, timeout_s)

    async def _until_known(self) -> None:
        """The replicas are known once a pick was asked for."""
        if not self._fleet.candidates():
            await self._dispatcher.pick(Pick(self._router, Asked(0), book=False))

    async def _anyone(self) -> bool:
        try:
            await self._dispatcher.pick(Pick(self._router, Asked(0), book=False), timeout_s=1.0)
        except HTTPError:
            return False
        return True

    async def _models(self, scope: Scope, send: Send) -> None:
        cards = await self.models(scope)
        if cards is None:
            raise HTTPError(502, "no replica could be reached", "upstream_error", retry_after_s=1)
        self._metrics.requests.labels(200).inc()
        await send_json(send, 200, {"object": "list", "data": cards})

    async def _explain(self, scope: Scope, raw: bytes, send: Send) -> None:
        try:
            body = parsed(scope, raw)
        except InvalidRequest as error:
            raise HTTPError(400, str(error), "invalid_request_error", error.param) from error
        asked = await self._asked("/v1/completions" if "prompt" in body else "/v1/chat/completions", scope, raw)
        pick = Pick(self._router, asked, self._dispatcher.usable, book=False)
        await self._dispatcher.pick(pick)
        assert pick.decision is not None
        await send_json(send, 200, explanation(pick.decision))


def explanation(decision: Decision) -> dict[str, Any]:
    """The answer of `POST /explain`; candidates best first."""
    return {
        "replica": decision.replica_id,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "candidates": [
            {
                "replica": one.view.replica_id,
                "overlap_blocks": one.view.overlap_blocks,
                "owned_blocks": one.view.owned_blocks,
                "trust": one.view.trust,
                "cost_s": one.cost_s,
                "terms": dict(one.terms),
            }
            for one in decision.candidates
        ],
        "reason": decision.reason,
    }
