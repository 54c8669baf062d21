"""Everything of vLLM's HTTP API that generates no text: health, models, tokens, sleep, cache, adapters, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from replicas.emulated import metrics
from replicas.emulated.api import token_ids_to_decode
from replicas.emulated.engine import Engine
from replicas.emulated.errors import ApiError
from replicas.emulated.models import ServedModels
from replicas.emulated.prompts import Prompts
from router.api_forms import COUNT_TOKENS_PATH
from router.prompt import TOKENIZE_PATH, parse_body


class AdminApi:
    """The handlers. `slow_start_s`: wall-clock seconds from now for which /health says 503."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        models: ServedModels,
        server_load: Callable[[], int],
        *,
        max_model_len: int,
        slow_start_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._models = models
        self._server_load = server_load
        self._max_model_len = max_model_len
        self._metrics = metrics.registry(engine, models.base)
        self._clock = asyncio.get_running_loop().time
        self._healthy_from = self._clock() + slow_start_s

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/load", self._load),
            Route("/metrics", self._scrape),
            Route("/v1/models", self._list_models),
            Route("/v1/load_lora_adapter", self._load_adapter, methods=post),
            Route("/v1/unload_lora_adapter", self._unload_adapter, methods=post),
            Route(TOKENIZE_PATH, self._tokenize, methods=post),
            Route("/detokenize", self._detokenize, methods=post),
            Route(COUNT_TOKENS_PATH, self._count_tokens, methods=post),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=post),
            Route("/sleep", self._sleep, methods=post),
            Route("/wake_up", self._wake_up, methods=post),
            Route("/is_sleeping", self._is_sleeping),
        ]

    async def _health(self, request: Request) -> Response:
        ill = self._engine.stopped or self._clock() < self._healthy_from
        return Response(status_code=503 if ill else 200)

    async def _version(self, request: Request) -> Response:
        try:
            own = version("whohas")
        except PackageNotFoundError:
            own = "0"
        return JSONResponse({"version": f"{own}+emulated"})

    async def _load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._server_load()})

    async def _scrape(self, request: Request) -> Response:
        return Response(metrics.render(self._metrics), media_type="text/plain; version=0.0.4")

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models.cards()})

    async def _load_adapter(self, request: Request) -> Response:
        body = parse_body(await request.body())
        in_place = body.get("load_inplace") is True
        name, path = _string(body, "lora_name"), _string(body, "lora_path")
        return PlainTextResponse(self._models.load(name, path, in_place=in_place))

    async def _unload_adapter(self, request: Request) -> Response:
        body = parse_body(await request.body())
        return PlainTextResponse(self._models.unload(_string(body, "lora_name")))

    async def _tokenize(self, request: Request) -> Response:
        raw = await request.body()
        body = parse_body(raw)
        self._models.resolve(body)
        if body.get("prompt") is None and not body.get("messages"):
            raise ApiError(400, "prompt or messages is required", "prompt")
        (ids,) = await self._prompts.token_ids(TOKENIZE_PATH, body, len(raw))
        return JSONResponse({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = parse_body(await request.body())
        self._models.resolve(body)
        return JSONResponse({"prompt": self._prompts.decode(token_ids_to_decode(body))})

    async def _count_tokens(self, request: Request) -> Response:
        raw = await request.body()
        path, body = self._prompts.as_chat(COUNT_TOKENS_PATH, parse_body(raw))
        self._models.resolve(body)
        (ids,) = await self._prompts.token_ids(path, body, len(raw))
        count = len(ids)
        return JSONResponse({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        preempt = _is_true(request.query_params.get("reset_running_requests"))
        done = self._engine.scheduler.reset_prefix_cache(preempt_running=preempt)
        return JSONResponse({"success": done})

    async def _sleep(self, request: Request) -> Response:
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            raise ApiError(400, "level must be 0 to 2, mode one of abort, wait and keep")
        if mode == "wait":
            # Nothing tells when an engine falls idle, and here nobody is in a hurry.
            while self._engine.scheduler.running or self._engine.scheduler.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self._engine.sleep(int(level), keep_running=mode == "keep")
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: Request) -> Response:
        self._engine.wake_up()
        return JSONResponse({"status": "awake", "tags": request.query_params.getlist("tags") or None})

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._engine.sleep_level is not None})


def _is_true(text: str | None) -> bool:
    return (text or "").lower() in ("1", "true", "yes", "on")


def _string(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{key} must be a string", key)
    return value
