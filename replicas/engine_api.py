"""What a replica asks of its engine's HTTP server: vLLM's /health, /metrics and /v1/models."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

_LOAD: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "num_running": ("vllm:num_requests_running", sum),
    "num_waiting": ("vllm:num_requests_waiting", sum),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", max),
    "asleep": ("vllm:engine_sleep_state:awake", lambda awake: float(not all(awake))),
    "discarded": ("vllm:engine_sleep_state:discarded", max),
}
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Told by the engine itself. Tokens; `num_blocks` is vLLM's number, with the null block. None: not told.
    `ranks`: data-parallel ranks behind its API, each with a cache of its own."""

    block_size: int | None
    max_model_len: int | None
    num_blocks: int | None = None
    models: tuple[str, ...] = ()
    ranks: int = 1


def pinned(dp_rank: int | None) -> dict[str, str]:
    """Headers that make a vLLM server with several data-parallel ranks use that one."""
    return {} if dp_rank is None else {"x-data-parallel-rank": str(dp_rank)}


async def get(url: str, timeout_s: float = 5.0, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body. Raises OSError (also TimeoutError) where no HTTP answer comes; no proxies, no redirects."""
    return await asyncio.to_thread(_request, "GET", url, timeout_s, dict(headers or {}), None)


async def post(
    url: str, body: object, timeout_s: float = 120.0, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Like `get`, with a JSON body."""
    all_headers = {"content-type": "application/json", **(headers or {})}
    return await asyncio.to_thread(_request, "POST", url, timeout_s, all_headers, json.dumps(body).encode())


def _request(method: str, url: str, timeout_s: float, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, target, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except HTTPException as error:
        raise ConnectionError(f"no HTTP from {parts.netloc}: {error!r}") from error
    finally:
        connection.close()


async def read_facts(url: str, headers: Mapping[str, str] | None = None) -> EngineFacts:
    """Raises OSError where the engine can't be reached; what it doesn't tell is None."""
    status, body = await get(f"{url}/v1/models", headers=headers)
    models = _models(body) if status == 200 else []
    lengths = [length for card in models if isinstance(length := card.get("max_model_len"), int)]
    status, body = await get(f"{url}/metrics", headers=headers)
    configs = _cache_configs(body.decode("utf-8", "replace")) if status == 200 else []
    labels = configs[0] if configs else {}
    return EngineFacts(
        block_size=_positive(labels.get("block_size")),
        max_model_len=max(lengths, default=None),
        num_blocks=_positive(labels.get("num_gpu_blocks")),
        models=tuple(str(card.get("id")) for card in models),
        ranks=max(1, len({config.get("engine") for config in configs})),
    )


async def read_load(url: str, dp_rank: int | None = None) -> dict[str, float]:
    """As far as told, of all data-parallel ranks together or of one: `num_running`, `num_waiting` (requests),
    `kv_cache_usage` (0..1), and, 0 or 1, `asleep` and `discarded`, which an engine's blocks are at levels 1 and 2.
    Raises OSError."""
    status, body = await get(f"{url}/metrics")
    if status != 200:
        raise ConnectionError(f"{url}/metrics answered {status}")
    values: dict[str, list[float]] = {}
    for sample in _SAMPLE.finditer(body.decode("utf-8", "replace")):
        labels = dict(_LABEL.findall(sample["labels"] or ""))
        if dp_rank is None or labels.get("engine") == str(dp_rank):
            values.setdefault(sample["name"] + _state(labels), []).append(float(sample["value"]))
    return {name: total(values[metric]) for name, (metric, total) in _LOAD.items() if metric in values}


def _state(labels: Mapping[str, str]) -> str:
    state = labels.get("sleep_state")
    return "" if state is None else ":awake" if state == "awake" else ":discarded"


def _models(body: bytes) -> list[dict[str, object]]:
    try:
        data = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError):
        return []
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def _cache_configs(text: str) -> list[dict[str, str]]:
    """One a data-parallel rank."""
    names = ("vllm:cache_config_info", "vllm:cache_config")
    samples = [sample for sample in _SAMPLE.finditer(text) if sample["name"] in names and sample["labels"]]
    return [dict(_LABEL.findall(sample["labels"])) for sample in samples]


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None
