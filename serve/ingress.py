"""The HTTP front: admit, parse once, place, relay.

Every path of the engine's API is relayed as bytes; whohas answers itself only for `/health`, `/metrics` and `/explain`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.errors import InvalidRequest, OwnershipUnavailable
from router.ownership.redis import RedisOwnershipMap, key_prefix
from router.prompt import PromptEncoder, parse_body
from router.router import Asked, Placement, Router
from router.types import Decision, ReplicaId
from serve.config import AppConfig
from serve.metrics import Metrics, SharedMetrics
from serve.relay import Headers, Message, Receive, Scope, Send, Upstream, UpstreamFailed, end_broken_stream
from serve.running import Candidate, candidate_of, candidates

GENERATION_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
_ENGINE_PATHS = frozenset({"/tokenize", "/detokenize", "/version", "/load"})
_SUSPECT_S = 5.0
"""How long a replica that could not be reached is left out, unless it is the only one."""
_ATTEMPTS = 2

logger = logging.getLogger("whohas.ingress")


class HTTPError(Exception):
    """An answer of our own, in OpenAI's error shape."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


class _Pick:
    """One request's choice among the replicas that Serve knows; see `serve.request_router`."""

    def __init__(self, router: Router, asked: Asked, left_out: Mapping[ReplicaId, float], book: bool) -> None:
        self._router = router
        self._asked = asked
        self._left_out = left_out
        self._book = book
        self.decision: Decision | None = None
        self.placement: Placement | None = None

    def choose(self, candidates: Sequence[ReplicaId]) -> ReplicaId:
        now = time.monotonic()
        wanted = [one for one in candidates if self._left_out.get(one, 0.0) < now] or candidates
        if self._book and self.placement is None:
            self.placement = self._router.place(self._asked, wanted)
            self.decision = self.placement.decision
        else:
            self.decision = self._router.decide(self._asked, wanted)
        return self.decision.replica_id


class Ingress:
    """One process of the front. Raw ASGI: what arrives is forwarded, nothing is decoded on the way."""

    async def __init__(self, replicas: DeploymentHandle[Any], config: AppConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._config = config
        self._replicas = replicas
        self._deployment = (replicas.app_name, replicas.deployment_name)
        self._suspects: dict[ReplicaId, float] = {}
        self._map = RedisOwnershipMap(
            config.redis, config.fleet_name, look_up_timeout_s=config.router.look_up_timeout_s
        )
        try:
            await self._map.connect()
        except OwnershipUnavailable as error:
            logger.warning("starting without the ownership map: %s", error)
        load = partial(PromptEncoder.load, config.model, config.tokenizer_source, config.adapters, fast=True)
        encoder = await asyncio.to_thread(load)
        self.router = Router(f"router-{self._name}", encoder, self._map, config.router, time.monotonic)
        await self.router.start()
        self._upstream = Upstream(config.ingress.connect_timeout_s)
        self._metrics = Metrics()
        key = f"{key_prefix(config.fleet_name)}x"
        self._shared_metrics = SharedMetrics(self._metrics, config.redis, key, self._name)
        self._shared_metrics.start()

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes methods for ASGI 2
            await self._answer(scope, receive, send)

        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003, "reason": "whohas speaks HTTP only"})
            return
        try:
            await self._route(scope, receive, send)
        except HTTPError as error:
            self._metrics.requests.labels(error.status).inc()
            await _send_error(send, error)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._shared_metrics.close()
                await self.router.close()
                await self._upstream.close()
                await self._map.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health" and method in ("GET", "HEAD"):
            await self._health(send)
        elif path == "/metrics" and method == "GET":
            self._observe_fleet()
            text = await self._shared_metrics.text()
            await _send(send, 200, text, b"text/plain; version=0.0.4; charset=utf-8")
        elif path == "/explain" and method == "POST":
            await self._explain(scope, await self._read_body(scope, receive), send)
        elif path.startswith("/v1/") or path in GENERATION_PATHS or path in _ENGINE_PATHS:
            await self._serve(scope, await self._read_body(scope, receive), send)
        else:
            raise HTTPError(404, f"no such path: {method} {path}", "not_found_error")

    async def _health(self, send: Send) -> None:
        """Live: it answers. Ready: a replica is there. Degraded: it routes by load, and why."""
        ready = bool(candidates(*self._deployment)) or await self._anyone()
        doubts = {one.replica_id: one.doubt for one in self.router.fleet.replicas.values() if one.doubt}
        status = "unready" if not ready else "degraded" if self.router.degraded or doubts else "ok"
        body = {
            "status": status,
            "ready": ready,
            "degraded": self.router.degraded,
            "replicas": len(candidates(*self._deployment)),
            "replicas_in_map": len(self.router.fleet.replicas),
            "doubts": doubts,
        }
        await _send_json(send, 200 if ready else 503, body)

    def _observe_fleet(self) -> None:
        self._metrics.observe_fleet(self.router.fleet, self.router.trust(), bool(self.router.degraded))

    async def _anyone(self) -> bool:
        try:
            await self._pick(_Pick(self.router, Asked(0), {}, book=False), timeout_s=1.0)
        except HTTPError:
            return False
        return True

    async def _explain(self, scope: Scope, raw: bytes, send: Send) -> None:
        try:
            body = parse_body(raw)
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            asked = await self.router.look_up(path, body, len(raw))
        except InvalidRequest as error:
            raise HTTPError(400, str(error), "invalid_request_error", error.param) from error
        pick = _Pick(self.router, asked, self._suspects, book=False)
        await self._pick(pick)
        assert pick.decision is not None
        await _send_json(send, 200, explanation(pick.decision))

    async def _serve(self, scope: Scope, raw: bytes, send: Send) -> None:
        generates = scope["method"] == "POST" and scope["path"] in GENERATION_PATHS
        started = time.perf_counter()
        asked = await self._asked(scope["path"], raw) if generates else Asked(0)
        self._metrics.in_flight.inc()
        try:
            for attempt in range(_ATTEMPTS):
                pick = _Pick(self.router, asked, self._suspects, book=generates)
                try:
                    if await self._attempt(scope, raw, send, pick, started, last=attempt == _ATTEMPTS - 1):
                        return
                finally:
                    if pick.placement is not None:
                        self.router.release(pick.placement)
                self._metrics.retries.inc()
        finally:
            self._metrics.in_flight.dec()

    async def _asked(self, path: str, raw: bytes) -> Asked:
        try:
            asked = await self.router.look_up(path, parse_body(raw), len(raw))
        except InvalidRequest as error:
            raise HTTPError(400, str(error), "invalid_request_error", error.param) from error
        if asked.note:
            self._metrics.by_load.labels(asked.note.partition(":")[0]).inc()
        return asked

    async def _attempt(self, scope: Scope, raw: bytes, send: Send, pick: _Pick, started: float, *, last: bool) -> bool:
        """One try at one replica. False: nothing reached the client, and another replica may do better."""
        candidate = await self._pick(pick)
        decision, placement = pick.decision, pick.placement
        assert decision is not None
        if placement is not None:
            self._metrics.decision.observe(time.perf_counter() - started)
            self._metrics.prompt_tokens.inc(decision.prompt_tokens)
            self._metrics.predicted.inc(decision.predicted_cached_tokens)

        def on_first_chunk() -> None:
            self._metrics.first_byte.observe(time.perf_counter() - started)
            if placement is not None:
                self.router.first_token(placement)

        extra = _decision_headers(decision)
        try:
            status, cached = await self._upstream.relay(
                candidate.pin(scope), send, candidate.url, raw, extra, on_first_chunk
            )
        except UpstreamFailed as error:
            self._suspects[candidate.replica_id] = time.monotonic() + _SUSPECT_S
            logger.warning("replica %s failed: %s", candidate.replica_id, error)
            if error.sent:
                self._metrics.requests.labels("broken").inc()
                if not error.stream:  # its length was promised: only a cut connection tells the client
                    raise
                await end_broken_stream(send, "the replica failed while answering")
                return True
            if last:
                raise HTTPError(502, "no replica could be reached", "upstream_error", retry_after_s=1) from error
            return False
        self._suspects.pop(candidate.replica_id, None)
        self._metrics.requests.labels(status).inc()
        if placement is not None and cached is not None:
            self._metrics.observe_prediction(decision.replica_id, decision.predicted_cached_tokens, cached)
            self.router.observe(placement, cached)
        return True

    async def _pick(self, pick: _Pick, timeout_s: float | None = None) -> Candidate:
        try:
            async with asyncio.timeout(timeout_s or self._config.ingress.no_replica_timeout_s):
                # Pick only: the request goes to the engine's own port, so Serve must not hold a slot for it.
                async with self._replicas.choose_replica(pick, _reserve=False) as selection:
                    return candidate_of(selection.replica_id, selection.replica_metadata)
        except TimeoutError as error:
            raise HTTPError(503, "no replica is ready yet", "service_unavailable", retry_after_s=5) from error

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._config.ingress.max_body_bytes
        parts: list[bytes] = []
        size = 0
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
            if not message.get("more_body", False):
                break
        if size > limit:  # read to the end first: a client that is still sending would not see the answer
            raise HTTPError(413, f"the body has {size} bytes; at most {limit} are taken", "invalid_request_error")
        return b"".join(parts)


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


def _decision_headers(decision: Decision) -> Headers:
    return [
        (b"x-whohas-replica", decision.replica_id.encode()),
        (b"x-whohas-predicted-cached-tokens", b"%d" % decision.predicted_cached_tokens),
    ]


async def _send(send: Send, status: int, body: bytes, content_type: bytes, extra: Headers | None = None) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_json(send: Send, status: int, value: Any, extra: Headers | None = None) -> None:
    await _send(send, status, msgspec.json.encode(value), b"application/json", extra)


async def _send_error(send: Send, error: HTTPError) -> None:
    body = {"message": str(error), "type": error.kind, "param": error.param, "code": error.status}
    extra = [(b"retry-after", b"%d" % error.retry_after_s)] if error.retry_after_s else None
    await _send_json(send, error.status, {"error": body}, extra)
