"""vLLM's HTTP API over one emulated engine."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from xxhash import xxh64_intdigest

from replicas.emulated.admin import AdminApi
from replicas.emulated.api import CHAT_PATH, COMPLETIONS_PATH, Generation, parse_generation
from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.choices import Choice, find_stop
from replicas.emulated.engine import Engine
from replicas.emulated.errors import ApiError
from replicas.emulated.faults import FaultInjector, Faults
from replicas.emulated.forms import Form, Reply
from replicas.emulated.front import Front
from replicas.emulated.messages_form import MessagesForm
from replicas.emulated.models import ServedModels
from replicas.emulated.openai_forms import ChatForm, CompletionForm
from replicas.emulated.prompts import Prompts
from replicas.emulated.responses import GenerationResponse
from replicas.emulated.responses_form import ResponsesForm
from replicas.emulated.scheduler import EngineRequest
from replicas.emulated.text import EmulatedText
from replicas.emulated.tools import ToolCall
from router.api_forms import FORM_PATHS, MESSAGES_PATH, RESPONSES_PATH
from router.errors import InvalidRequest, UnknownPrompt
from router.prompt import PromptEncoder, parse_body

_SESSION_HEADER = "x-session-id"
_PRIORITY_HEADER = "x-vllm-priority"

# How ids begin, and what answers, by path.
_FORMS: Mapping[str, tuple[str, Callable[[Reply], Form]]] = {
    CHAT_PATH: ("chatcmpl-", ChatForm),
    COMPLETIONS_PATH: ("cmpl-", CompletionForm),
    RESPONSES_PATH: ("resp_", ResponsesForm),
    MESSAGES_PATH: ("chatcmpl-", MessagesForm),
}


class EngineApi:
    """The handlers. `hash_seed` makes this engine's block hashes its own."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        models: ServedModels,
        *,
        max_model_len: int,
        hash_seed: int,
        faults: Faults | None = None,
        allow_faults: bool = False,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._prompts = Prompts(encoder)
        self._models = models
        self._max_model_len = max_model_len
        self._hash_seed = hash_seed
        self._text = EmulatedText(encoder)
        self._faults = faults or Faults()
        self._allow_faults = allow_faults

    def app(self) -> ASGIApp:
        front = Front(self._routed(lambda: front.server_load))
        if self._allow_faults or self._faults != Faults():
            front.app = FaultInjector(front.app, self._faults, allow_header=self._allow_faults)
        return front

    def _routed(self, server_load: Callable[[], int]) -> Starlette:
        admin = AdminApi(
            self._engine,
            self._prompts,
            self._models,
            server_load,
            max_model_len=self._max_model_len,
            slow_start_s=self._faults.slow_start_s,
        )
        generating = [Route(path, self._generate, methods=["POST"]) for path in _FORMS]
        handlers = dict.fromkeys((ApiError, InvalidRequest, UnknownPrompt, HTTPException), _error_response)
        return Starlette(
            routes=[*generating, *admin.routes()], exception_handlers={**handlers, ClientDisconnect: _client_gone}
        )

    async def _generate(self, request: Request) -> GenerationResponse:
        raw = await request.body()
        path, body = request.url.path, parse_body(raw)
        _check_form(path, body)
        chat_path, converted = self._prompts.as_chat(path, body)
        generation = parse_generation(chat_path, _with_headers(converted, request), self._models)
        prompts = await self._prompts.token_ids(chat_path, converted, len(raw))
        prefix, form = _FORMS[path]
        response_id = prefix + (uuid.uuid4().hex if path == RESPONSES_PATH else request.state.request_id)
        choices = [
            self._choice(generation, f"{response_id}-{index}", index, ids)
            for index, ids in enumerate(ids for ids in prompts for _ in range(generation.n))
        ]
        if self._engine.stopped:
            raise ApiError(503, "The engine has stopped.")
        alternatives = self._text.alternatives(max(generation.logprobs or 0, generation.prompt_logprobs or 0))
        reply = Reply(response_id, int(time.time()), generation, choices, body, alternatives)
        return GenerationResponse(self._engine, reply, form(reply))

    def _choice(self, generation: Generation, request_id: str, index: int, ids: Sequence[int]) -> Choice:
        if not ids:
            raise ApiError(400, "The prompt cannot be empty.", "prompt")
        call = ToolCall(self._encoder, generation.call) if generation.call else None
        natural = self._text.natural_length(chat=generation.chat) if call is None else len(call)
        num_output, cut = generation.output_length(len(ids), natural, self._max_model_len)
        # The answer depends on nothing but the prompt and which of its `n` answers this is.
        seed = xxh64_intdigest(array("I", ids).tobytes(), index % generation.n)
        answer = call or self._text.answer(seed, chat=generation.chat)
        stop = None
        if generation.stop and call is None:
            ahead = self._text.answer(seed, chat=generation.chat)
            for _ in islice(ahead, num_output):
                pass
            include, least = generation.include_stop, generation.min_tokens
            if stop := find_stop(ahead.texts, generation.stop, include=include, min_tokens=least):
                num_output, cut = stop.num_tokens, False
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
        return Choice(
            index,
            request,
            answer,
            self._encoder.decode,
            echo_ids=ids if generation.echo else (),
            echo_only=generation.max_tokens == 0,
            hold_back=max(map(len, generation.stop), default=1) - 1 if call is None else 0,
            stop=stop,
        )


def _check_form(path: str, body: Mapping[str, Any]) -> None:
    """What the Responses and the Messages API ask for that chat doesn't. Raises ApiError."""
    if path == RESPONSES_PATH:
        if body.get("prompt") is not None:
            raise ApiError(400, "prompt template is not supported", "prompt")
        if (previous := body.get("previous_response_id")) is not None:
            # As with vLLM by default: nothing is stored.
            raise ApiError(404, f"Response with id '{previous}' not found.", "response_id")
    elif path == MESSAGES_PATH:
        for key in ("model", "max_tokens"):
            if not body.get(key):
                raise ApiError(400, f"{key} is required", key)


def _with_headers(body: Mapping[str, Any], request: Request) -> Mapping[str, Any]:
    """The body, and what vLLM takes from headers as well: a session where the body names none, and a priority."""
    session, priority = request.headers.get(_SESSION_HEADER), request.headers.get(_PRIORITY_HEADER)
    if session and not body.get("session_id"):
        body = {**body, "session_id": session}
    if priority is not None and priority.removeprefix("-").isdecimal():
        body = {**body, "priority": int(priority)}
    return body


async def _error_response(request: Request, error: Exception) -> Response:
    # What is no JSON object is refused before it is known what API was meant.
    in_messages_shape = request.url.path in FORM_PATHS - {RESPONSES_PATH} and not isinstance(error, InvalidRequest)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), kind=HTTPStatus(error.status_code).phrase)
    elif not isinstance(error, ApiError):
        error = ApiError(400, str(error), getattr(error, "param", None))
    body = error.messages_body() if in_messages_shape else error.body()
    return JSONResponse(body, status_code=error.status)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
