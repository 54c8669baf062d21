"""vLLM's HTTP API over one emulated engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from xxhash import xxh64_intdigest

from replicas.emulated import metrics
from replicas.emulated.api import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    ApiError,
    Generation,
    ServedModels,
    parse_generation,
    token_ids_to_decode,
)
from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.engine import Engine
from replicas.emulated.responses import Choice, GenerationResponse
from replicas.emulated.scheduler import EngineRequest
from replicas.emulated.text import EmulatedText
from router.errors import InvalidRequest, UnknownPrompt
from router.prompt import PromptEncoder, parse_body

TOKENIZE_PATH = "/tokenize"

# Tokenising more than this would hold up everybody's tokens; for less, a thread costs more than the work.
_INLINE_BODY_BYTES = 16_384


class EngineApi:
    """The handlers. `hash_seed` makes this engine's block hashes its own."""

    def __init__(
        self, engine: Engine, encoder: PromptEncoder, models: ServedModels, *, max_model_len: int, hash_seed: int
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._models = models
        self._max_model_len = max_model_len
        self._hash_seed = hash_seed
        self._text = EmulatedText(encoder)
        self._metrics = metrics.registry(engine.scheduler, models.base)
        self._created = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route(CHAT_PATH, self._generate, methods=["POST"]),
            Route(COMPLETIONS_PATH, self._generate, methods=["POST"]),
            Route(TOKENIZE_PATH, self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/metrics", self._scrape),
        ]
        handlers = dict.fromkeys((ApiError, InvalidRequest, UnknownPrompt, HTTPException), _error_response)
        return Starlette(routes=routes, exception_handlers={**handlers, ClientDisconnect: _client_gone})

    async def _generate(self, request: Request) -> GenerationResponse:
        raw = await request.body()
        body = parse_body(raw)
        path = request.url.path
        generation = parse_generation(path, body, self._models)
        prompts = await self._token_ids(path, body, len(raw))
        response_id = f"{'chatcmpl' if generation.chat else 'cmpl'}-{_request_id(request)}"
        choices = [
            self._choice(generation, f"{response_id}-{index}", index, ids)
            for index, ids in enumerate(ids for ids in prompts for _ in range(generation.n))
        ]
        if self._engine.stopped:
            raise ApiError(503, "The engine has stopped.")
        return GenerationResponse(self._engine, generation, response_id, choices, sum(map(len, prompts)))

    def _choice(self, generation: Generation, request_id: str, index: int, ids: Sequence[int]) -> Choice:
        if not ids:
            raise ApiError(400, "The prompt cannot be empty.", "prompt")
        natural = self._text.natural_length(chat=generation.chat)
        num_output, cut = generation.output_length(len(ids), natural, self._max_model_len)
        # The answer depends on nothing but the prompt and which of its `n` answers this is.
        seed = xxh64_intdigest(array("I", ids).tobytes(), index % generation.n)
        answer = self._text.answer(seed, chat=generation.chat)
        request = EngineRequest(
            request_id=request_id,
            chain=BlockChain(ids, self._engine.scheduler.pool.block_size, generation.keys, self._hash_seed),
            num_output=num_output,
            output=answer,
            priority=generation.priority,
            finish_reason="length" if cut else "stop",
            session_id=generation.session_id,
            reuse_cache=generation.reuse_cache,
            report_hits=generation.report_hits,
        )
        echo_text = self._encoder.decode(ids) if generation.echo else ""
        return Choice(index, request, answer, echo_text, echo_only=generation.max_tokens == 0)

    async def _token_ids(self, path: str, body: Mapping[str, Any], size: int) -> list[list[int]]:
        if size <= _INLINE_BODY_BYTES:
            return self._encoder.token_ids(path, body)
        return await asyncio.to_thread(self._encoder.token_ids, path, body)

    async def _tokenize(self, request: Request) -> Response:
        raw = await request.body()
        body = parse_body(raw)
        self._models.resolve(body)
        if body.get("prompt") is None and not body.get("messages"):
            raise ApiError(400, "prompt or messages is required", "prompt")
        (ids,) = await self._token_ids(TOKENIZE_PATH, body, len(raw))
        return JSONResponse({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = parse_body(await request.body())
        self._models.resolve(body)
        return JSONResponse({"prompt": self._encoder.decode(token_ids_to_decode(body))})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        preempt = request.query_params.get("reset_running_requests", "").lower() in ("1", "true")
        done = self._engine.scheduler.reset_prefix_cache(preempt_running=preempt)
        return JSONResponse({"success": done})

    async def _list_models(self, request: Request) -> Response:
        base = self._models.base
        cards = [self._card(base, None), *(self._card(name, base) for name in self._models.adapters)]
        return JSONResponse({"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            # vLLM gives the length with the base model alone.
            "max_model_len": self._max_model_len if parent is None else None,
        }

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self._engine.stopped else 200)

    async def _version(self, request: Request) -> Response:
        try:
            own = version("whohas")
        except PackageNotFoundError:
            own = "0"
        return JSONResponse({"version": f"{own}+emulated"})

    async def _scrape(self, request: Request) -> Response:
        return Response(metrics.render(self._metrics), media_type="text/plain; version=0.0.4")


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or uuid.uuid4().hex


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        error = ApiError(400, str(error), getattr(error, "param", None))
    return JSONResponse(error.body(), status_code=error.status)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
