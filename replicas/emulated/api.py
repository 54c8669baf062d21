"""Request bodies as vLLM's OpenAI API takes them: checked fields in, or an error in vLLM's shape out.

Fields that don't change an emulated answer are ignored, known or not. Prompts are left to the router's encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.emulated.block_hashes import CacheKeys
from replicas.emulated.errors import ApiError
from replicas.emulated.models import ServedModels
from replicas.emulated.tools import AskedCall, asked_call

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_CHOICES = 128
_MAX_LOGPROBS = 20
_MAX_STOPS = 64
_MAX_SALT_CHARACTERS = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")


@dataclass(frozen=True, slots=True)
class Generation:
    """The checked parameters of one chat or completions request; token counts are None where not given.

    `logprobs` and `prompt_logprobs` are how many alternatives to name beside each token, None for no log-probabilities.
    """

    chat: bool
    model: str
    keys: CacheKeys
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    priority: int = 0
    session_id: str | None = None
    reuse_cache: bool = True
    report_hits: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    call: AskedCall | None = None

    def output_length(self, num_prompt: int, natural_length: int, max_model_len: int) -> tuple[int, bool]:
        """Tokens to generate, and whether the answer is cut before its end.

        Raises ApiError 400 when the prompt, or the prompt and what was asked for, exceeds `max_model_len`.
        """
        room = max_model_len - num_prompt
        if room < max(1, self.max_tokens or 0):
            wanted = f" and {self.max_tokens} tokens for the output" if self.max_tokens else ""
            raise ApiError(
                400,
                f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_prompt} "
                f"input tokens{wanted}. Please reduce the length of the input prompt or the requested output.",
                "input_tokens" if room < 1 else "max_tokens",
            )
        limit = room if self.max_tokens is None else max(1, self.max_tokens)
        wished = limit if self.ignore_eos else max(natural_length, self.min_tokens)
        return min(limit, wished), limit < wished or self.ignore_eos


def parse_generation(path: str, body: Mapping[str, Any], models: ServedModels) -> Generation:
    """Checks everything but the prompt. Raises ApiError."""
    model = models.resolve(body)
    chat = path == CHAT_PATH
    if chat and (not isinstance(body.get("messages"), list) or not body["messages"]):
        raise ApiError(400, "messages must be a list of at least one message", "messages")
    if not chat and body.get("prompt") is None:
        raise ApiError(400, "prompt is required", "prompt")
    echo = _flag(body, "echo")
    stream = _flag(body, "stream")
    options = _object(body, "stream_options")
    xargs = _object(body, "vllm_xargs")
    session = body.get("session_id") or xargs.get("session_id")
    lora_id = models.lora_id(model)
    return Generation(
        chat=chat,
        model=model,
        keys=CacheKeys(lora_name=model if lora_id is not None else None, lora_id=lora_id, cache_salt=_cache_salt(body)),
        n=_integer(body, "n", 1, _MAX_CHOICES) or 1,
        max_tokens=_max_tokens(body, chat=chat, echo=echo),
        min_tokens=_integer(body, "min_tokens", 0) or 0,
        ignore_eos=_flag(body, "ignore_eos"),
        stream=stream,
        include_usage=stream and _flag(options, "include_usage"),
        continuous_usage=stream and _flag(options, "include_usage") and _flag(options, "continuous_usage_stats"),
        echo=echo and not chat,
        priority=_integer(body, "priority", None) or 0,
        session_id=session if isinstance(session, str) else None,
        reuse_cache=_reuses_cache(body, chat=chat, echo=echo),
        report_hits=xargs.get("kv_cache_report_mode") == "full",
        stop=_stop_strings(body),
        include_stop=_flag(body, "include_stop_str_in_output"),
        logprobs=_logprobs(body, chat=chat),
        prompt_logprobs=_integer(body, "prompt_logprobs", 0, _MAX_LOGPROBS),
        return_token_ids=_flag(body, "return_token_ids"),
        call=asked_call(body) if chat else None,
    )


def token_ids_to_decode(body: Mapping[str, Any]) -> list[int]:
    """The ids of a /detokenize body. Raises ApiError 400."""
    ids = body.get("tokens")
    if isinstance(ids, list) and all(type(token) is int and 0 <= token < 2**32 for token in ids):
        return ids
    raise ApiError(400, "tokens must be a list of token ids", "tokens")


def _max_tokens(body: Mapping[str, Any], *, chat: bool, echo: bool) -> int | None:
    if chat:
        newer = _integer(body, "max_completion_tokens", 1)
        return newer if newer is not None else _integer(body, "max_tokens", 1)
    if "max_tokens" not in body:
        return _DEFAULT_COMPLETION_TOKENS
    return _integer(body, "max_tokens", 0 if echo else 1)


def _reuses_cache(body: Mapping[str, Any], *, chat: bool, echo: bool) -> bool:
    """Whether cached blocks serve this request: not where log-probabilities of the whole prompt are asked for."""
    if body.get("prompt_logprobs") is not None:
        return False
    return not echo or (body.get("top_logprobs", 0) if chat else body.get("logprobs")) is None


def _stop_strings(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    given = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(given, list) or len(given) > _MAX_STOPS or not all(isinstance(one, str) for one in given):
        raise ApiError(400, f"stop must be a string or a list of at most {_MAX_STOPS} strings", "stop")
    if "" in given:
        raise ApiError(400, "stop cannot contain an empty string.", "stop")
    return tuple(given)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> int | None:
    if not chat:
        return _integer(body, "logprobs", 0, _MAX_LOGPROBS)
    top = _integer(body, "top_logprobs", 0, _MAX_LOGPROBS)
    if _flag(body, "logprobs"):
        return top or 0
    if top:
        raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    return None


def _cache_salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not 0 < len(salt) <= _MAX_SALT_CHARACTERS or _SALT_FORBIDDEN & set(salt):
        raise ApiError(
            400, f"cache_salt must be 1 to {_MAX_SALT_CHARACTERS} characters, none of them @ / \\ or NUL", "cache_salt"
        )
    return salt


def _integer(body: Mapping[str, Any], key: str, least: int | None, most: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ApiError(400, f"{key} must be an integer", key)
    if least is not None and value < least:
        raise ApiError(400, f"{key} must be at least {least}, got {value}.", key)
    if most is not None and value > most:
        raise ApiError(400, f"{key} must be at most {most}, got {value}.", key)
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ApiError(400, f"{key} must be true or false", key)


def _object(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if value is None or isinstance(value, dict):
        return value or {}
    raise ApiError(400, f"{key} must be an object", key)
