"""What tests and benchmark of real engines share: a replica in a process of its own, requests to `whohas up`."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replicas.config import EngineConfig
from replicas.process import EngineFailed
from replicas.replica import Replica
from router.ownership.memory import MemoryOwnershipMap
from router.prompt import PromptEncoder
from tests.integration import live
from tests.integration.live import Answer, Live, whohas_up
from tests.vllm.adapters import RANK

CONTEXT = 4096
BLOCK = 32
"""Tokens: vLLM's attention on the CPU wants so many."""
WAIT_S = 120.0
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word in the dictionary",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "language": {"type": "string", "enum": ["de", "en", "fr"]}},
            "required": ["word"],
        },
    },
}


def engine_settings(tensor_parallel_size: int = 1) -> dict[str, Any]:
    """Small engines that leave the machine usable."""
    return {
        "kind": "vllm",
        "device": "cpu",
        "cpus": tensor_parallel_size,
        "max_model_len": CONTEXT,
        "tensor_parallel_size": tensor_parallel_size,
        "args": [
            *("--dtype", "float32", "--kv-cache-memory-bytes", str(256 * 2**20)),
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        ],
    }


@contextmanager
def real_fleet(
    folder: Path, model: Path, replicas: int = 2, adapters: Mapping[str, Path] | None = None
) -> Iterator[Live]:
    """`whohas up` with vLLM engines of `model`. They take a minute or, on a busy machine, several to start."""
    patient, live.START_S = live.START_S, 900.0
    try:
        settings, adapters = engine_settings(), adapters or {}
        if adapters:
            modules = [f"{name}={path}" for name, path in adapters.items()]
            settings["args"] += ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", *modules]
        # On a busy machine look-ups would miss their 20 ms and leases lapse, and nothing be predicted: no mistake of
        # what is tested.
        router = {"look_up_timeout_s": 30.0, "lease_s": 15.0}
        with whohas_up(
            folder,
            model=str(model),
            tokenizer="",
            adapters=list(adapters),
            engine=settings,
            router=router,
            replicas=replicas,
        ) as fleet:
            yield fleet
    finally:
        live.START_S = patient


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


def until_told(fleet: Live, replica: str, ids: Sequence[int], model: str, **fields: Any) -> None:
    """Until the map has every block of `ids` at `replica`, by its engine's events; but for the last id, which an engine
    that stops there never computes. `fields`: what else tells them apart."""
    body = {"model": model, "prompt": list(ids), **fields}

    def told() -> bool:
        candidates = fleet.request("POST", "/explain", body).json["candidates"]
        view = next((one for one in candidates if one["replica"] == replica), None)
        return view is not None and view["owned_blocks"] == (len(ids) - 1) // BLOCK

    until(told)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: its kind, what was predicted, what the engine reported (tokens), and how long it took."""

    kind: str
    predicted: int
    cached: int
    prompt_tokens: int
    replica: str
    seconds: float


class Traffic:
    """Requests one after the other, as chats that grow, prompts that share prefixes, tools and salts make them."""

    def __init__(
        self, fleet: Live, model: Path, seed: int = 0, *, tools: bool = True, adapters: Sequence[str] = ()
    ) -> None:
        self._fleet, self._model, self._tools, self._adapters = fleet, str(model), tools, adapters
        self._random = random.Random(seed)
        self._systems = [self._text(90) for _ in range(4)]
        self._chats: list[dict[str, Any]] = []

    def send(self, count: int) -> list[Outcome]:
        kinds = {
            "growing chat": self._grow,
            "new chat": self._open,
            "shared prefix": self._share,
            "text completion": self._complete,
            "token ids": self._ids,
        }
        chosen = self._random.choices(list(kinds), weights=[8, 4, 3, 2, 1], k=count)
        return [kinds[kind](kind) for kind in chosen]

    def _text(self, words: int) -> str:
        pieces = ("river", "größer", "plan", "naïve", "seven 7", "stone,", "a", "wharf", "東京", "over", "{x}", "so\n")
        return " ".join(self._random.choice(pieces) + str(self._random.randrange(50)) for _ in range(words))

    def _open(self, kind: str) -> Outcome:
        """A chat with one of a few system prompts; some have tools, some a salt of one of two tenants."""
        chat: dict[str, Any] = {"messages": [{"role": "system", "content": self._random.choice(self._systems)}]}
        if self._tools and self._random.random() < 0.3:
            chat["tools"] = [TOOL]
        if self._random.random() < 0.3:
            chat["cache_salt"] = self._random.choice(["tenant-a", "tenant-b"])
        if self._adapters and self._random.random() < 0.3:
            chat["model"] = self._random.choice(self._adapters)
        self._chats.append(chat)
        return self._turn(kind, chat)

    def _grow(self, kind: str) -> Outcome:
        return self._turn(kind, self._random.choice(self._chats)) if self._chats else self._open(kind)

    def _turn(self, kind: str, chat: dict[str, Any]) -> Outcome:
        if len(chat["messages"]) > 14:
            del chat["messages"][1:]
        if chat.get("tools") and self._random.random() < 0.3 and len(chat["messages"]) > 1:
            call = {"name": "look_up", "arguments": json.dumps({"word": self._text(1)}, ensure_ascii=False)}
            one = {"id": f"call-{self._random.randrange(10**6)}", "type": "function", "function": call}
            chat["messages"] += [
                {"role": "assistant", "content": None, "tool_calls": [one]},
                {"role": "tool", "tool_call_id": one["id"], "content": self._text(6)},
            ]
        else:
            chat["messages"].append({"role": "user", "content": self._text(self._random.randrange(3, 40))})
        fields = {"tools": " with tools", "cache_salt": " with a salt", "model": " by an adapter"}
        kind += "".join(text for field, text in fields.items() if field in chat)
        outcome, answer = self._ask(kind, "/v1/chat/completions", {**chat, "return_token_ids": True})
        # The chat may go on at once: of the answer's own blocks only events tell, and those come when they come.
        ids = [*answer.json["prompt_token_ids"], *answer.json["choices"][0]["token_ids"]]
        apart = {field: chat[field] for field in ("cache_salt",) if field in chat}
        until_told(self._fleet, answer.replica, ids, chat.get("model", self._model), **apart)
        if (text := answer.json["choices"][0]["message"]["content"]) is not None:
            chat["messages"].append({"role": "assistant", "content": text})
        return outcome

    def _share(self, kind: str) -> Outcome:
        system = {"role": "system", "content": self._random.choice(self._systems)}
        user = {"role": "user", "content": [{"type": "text", "text": self._text(5)}]}
        return self._ask(kind, "/v1/chat/completions", {"messages": [system, user]})[0]

    def _complete(self, kind: str) -> Outcome:
        prompt = self._random.choice(self._systems) + self._text(self._random.randrange(10))
        return self._ask(kind, "/v1/completions", {"prompt": prompt})[0]

    def _ids(self, kind: str) -> Outcome:
        prompt = [*range(1000, 1000 + 32 * self._random.randrange(1, 8)), self._random.randrange(5000)]
        return self._ask(kind, "/v1/completions", {"prompt": prompt})[0]

    def _ask(self, kind: str, path: str, fields: dict[str, Any]) -> tuple[Outcome, Answer]:
        limit = self._random.choice([1, 2, 4, 8, 40])
        body = {"model": self._model, **fields, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        answer = self._fleet.request("POST", path, body)
        seconds = time.perf_counter() - began
        assert answer.status == 200, answer.body
        tokens = answer.json["usage"]["prompt_tokens"]
        return Outcome(kind, answer.predicted, answer.cached, tokens, answer.replica, seconds), answer


async def actor(model: str, tensor_parallel_size: int) -> None:
    """A replica until it's killed, as its Ray actor runs it: tells what it found, and a health check that fails.

    The model needs no weights.
    """
    settings = engine_settings(tensor_parallel_size)
    config = EngineConfig(model=model, **{**settings, "args": (*settings["args"], "--load-format", "dummy")})
    replica = await Replica.start("real", config, MemoryOwnershipMap(time.monotonic))
    findings = await replica.shake_hands(PromptEncoder.load(model))
    await replica.check_health()
    told = {"facts": asdict(replica.facts), "findings": [str(one) for one in findings], "url": replica.url}
    print(json.dumps(told), flush=True)
    while True:
        try:
            await replica.check_health()
        except (EngineFailed, OSError) as error:
            print(json.dumps({"failed": str(error)}), flush=True)
            await replica.stop()
            return
        await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(actor(sys.argv[1], int(sys.argv[2])))
