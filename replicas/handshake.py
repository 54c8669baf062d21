"""The conformance handshake: does this engine cache what the router thinks it caches?

A canary prompt that nobody has seen is sent to the engine. Its blocks must come back in the KV events as the router
hashes them, and the same prompt sent again must be reported as cached, to the token. What differs is found by comparing
the two sides step by step, so that the finding names it: tokenizer, template, block size, events or their format.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from replicas.engine_api import post
from router.errors import RouterError
from router.hashing import chain, reusable_blocks
from router.types import BlockHash, Prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BLOCKS = 3
_EVENTS_S = 10.0
_POLL_S = 0.02
_OTHER_BLOCKS = "its KV events tell of other blocks than the router computed"
_NO_EVENTS = "no KV events arrived: are they switched on, and is the endpoint right?"
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word in the dictionary",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "language": {"type": "string", "enum": ["de", "en"]}},
            "required": ["word"],
        },
    },
}
_CALL = {"name": "look_up", "arguments": '{"word": "Zaunkönig", "language": "de"}'}
MEDIA = "media"
_GREY = (  # 64 by 64 pixels
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77SAA6VEEAoFAIBAIBAKBQCAQfA8G"
    "320AeXC6efoAAAAASUVORK5CYII="
)
_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_GREY}"}}
_TOOL_ROUND = (  # ids of nine characters: some templates insist
    {"role": "assistant", "content": None, "tool_calls": [{"id": "canary001", "type": "function", "function": _CALL}]},
    {"role": "tool", "tool_call_id": "canary001", "content": "wren"},
)


class Encoder(Protocol):
    """The router's own way from a body to token ids; `router.prompt.PromptEncoder` is one."""

    def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt: ...

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """What one canary showed. `variant`: base, salt, tools, adapter NAME, media; `problem`: empty where all agrees."""

    variant: str
    problem: str = ""

    @property
    def doubt(self) -> str:
        """Why nothing that the engine caches should be relied on. What goes wrong with media concerns those alone."""
        return str(self) if self.problem and self.variant != MEDIA else ""

    def __str__(self) -> str:
        return f"{self.variant}: {self.problem or 'ok'}"


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine under test. `holds`: have its events told of all these blocks? None where it tells no events.
    `counters`: what its collector has heard: `batches`, and what of it could not be used (see `BlockSet`). `headers`
    go with every request. `or_else`: what else might be why `holds` knows nothing, for the finding."""

    url: str
    model: str
    block_size: int
    holds: Callable[[Sequence[BlockHash]], Awaitable[bool]] | None
    counters: Callable[[], Awaitable[Mapping[str, int]]]
    headers: Mapping[str, str] = field(default_factory=dict)
    or_else: str = ""


class _NoSuchRequests(Exception):
    """This model or engine takes no requests of this kind: nothing to compare."""


async def shake_hands(engine: Engine, encoder: Encoder, nonce: str, adapters: Sequence[str] = ()) -> list[Finding]:
    """One finding for each of: the base model, a salted prompt, every adapter; and, where model and engine take such
    requests, a chat with tools and one with an image. `nonce` must be new for every call.

    Raises OSError where the engine does not answer at all.
    """
    variants: list[tuple[str, dict[str, Any]]] = [
        ("base", {"model": engine.model}),
        ("salt", {"model": engine.model, **_salt(nonce)}),
        ("tools", {"model": engine.model, "tools": [_TOOL], **_salt(nonce + "-tools")}),
        *((f"adapter {name}", {"model": name, **_salt(nonce + "-adapter")}) for name in adapters),
    ]
    findings: list[Finding] = []
    for name, fields in variants:
        with suppress(_NoSuchRequests):
            problem = await _try(engine, encoder, f"{nonce} {name}", fields)
            if problem == _NO_EVENTS and not findings:  # a subscriber that joined just now may have missed them
                problem = await _try(engine, encoder, f"{nonce} {name} again", fields)
            findings.append(Finding(name, problem))
            if problem == _NO_EVENTS:
                return findings
    with suppress(_NoSuchRequests):
        findings.append(Finding(MEDIA, await _try_media(engine, encoder, nonce)))
    return findings


def _salt(text: str) -> dict[str, str]:
    """Nothing of a chain with a salt of its own was ever cached, not even the head that all chats share: the events
    must tell of all of it, also to a collector that began to listen late."""
    return {"cache_salt": f"canary-{text}"}


async def _try(engine: Engine, encoder: Encoder, nonce: str, fields: dict[str, Any]) -> str:
    try:
        path, body, prompt = _canary(engine, encoder, nonce, fields)
    except RouterError as error:
        return f"the router can't tell the token ids of a plain chat ({error}): routed by load"
    before = await engine.counters()
    status, answer = await _ask(engine, path, body)
    if status in (400, 422) and "tools" in fields:
        raise _NoSuchRequests
    if status != 200:
        return f"the engine refused the canary: {status} {answer.get('error', answer)}"
    told = _usage(answer)
    if told.get("prompt_tokens") != prompt.num_tokens:
        return await _which_ids_differ(engine, encoder, path, body, prompt)
    hashes = chain(prompt.root, prompt.token_ids, engine.block_size)
    problem = await _events_problem(engine, hashes, before)
    if problem.startswith(_OTHER_BLOCKS) and _cached_tokens(answer):
        problem = ""  # its head was cached before anybody listened: the salted canaries must do
    if problem:
        return await _which_ids_differ(engine, encoder, path, body, prompt, unless_equal=problem)
    return await _repeat_problem(engine, path, body, prompt)


async def _try_media(engine: Engine, encoder: Encoder, nonce: str) -> str:
    """Is what stands before an image cached as it is without one? Some models put images in front of everything."""
    text = " ".join(["Canary", nonce, *(f"and number {i}" for i in range(_BLOCKS * engine.block_size // 3 + 1))])
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
    common = {"model": engine.model, "max_tokens": 1, "temperature": 0, **_salt(nonce + "-media")}
    without = {**common, "messages": [*turns, {"role": "user", "content": "What is this?"}]}
    with_image = {**common, "messages": [*turns, {"role": "user", "content": [_IMAGE]}]}
    try:
        head = encoder.prompt(CHAT, with_image)
    except RouterError as error:
        raise _NoSuchRequests from error
    before = await engine.counters()
    try:
        if (await _ask(engine, CHAT, without))[0] != 200:
            raise _NoSuchRequests
        status, answer = await _ask(engine, CHAT, with_image)
    except OSError as error:
        return f"a chat with an image got no answer: {error}"
    if 400 <= status < 500:
        raise _NoSuchRequests
    if status != 200:
        return f"the engine refused a chat with an image: {status}"
    hashes = chain(head.root, head.token_ids, engine.block_size)
    cached, expected = _cached_tokens(answer) or 0, len(hashes) * engine.block_size
    if cached < expected:
        return f"of a chat with an image {cached} tokens were cached, not the {expected} before it"
    return await _events_problem(engine, hashes, before)


def _canary(engine: Engine, encoder: Encoder, nonce: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any], Prompt]:
    """A chat of at least `_BLOCKS` full blocks and a bit; plain text where the model has no chat template."""
    words = ["Canary", nonce]
    count = 0
    while True:
        words += [f"and number {count + i}" for i in range(_BLOCKS * engine.block_size // 4 + 1)]
        count = len(words)
        text = " ".join(words)
        common = {**fields, "max_tokens": 1, "temperature": 0}
        chat = {**common, "messages": [{"role": "user", "content": text}, *(_TOOL_ROUND if "tools" in fields else ())]}
        if "tools" in fields and not _shows_tools(encoder, chat):
            raise _NoSuchRequests
        try:
            path, body, prompt = CHAT, chat, encoder.prompt(CHAT, chat)
        except RouterError:
            body = {**common, "prompt": text}
            path, prompt = COMPLETIONS, encoder.prompt(COMPLETIONS, body)
        if prompt.num_tokens > _BLOCKS * engine.block_size:
            return path, body, prompt


def _shows_tools(encoder: Encoder, chat: dict[str, Any]) -> bool:
    bare = {key: value for key, value in chat.items() if key != "tools"}
    try:
        return encoder.prompt(CHAT, chat).token_ids != encoder.prompt(CHAT, bare).token_ids
    except RouterError:
        return False


async def _ask(engine: Engine, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    status, raw = await post(f"{engine.url}{path}", body, headers=engine.headers)
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    return status, answer if isinstance(answer, dict) else {"error": raw[:200].decode("utf-8", "replace")}


def _usage(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    usage = answer.get("usage")
    return usage if isinstance(usage, dict) else {}


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    details = _usage(answer).get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


async def _events_problem(engine: Engine, hashes: Sequence[BlockHash], before: Mapping[str, int]) -> str:
    """Wait for the canary's blocks among those that the events told of; `before`: the counters when it was sent."""
    if engine.holds is None:
        return ""
    for _ in range(max(1, round(_EVENTS_S / _POLL_S))):
        if await engine.holds(hashes):
            return ""
        await asyncio.sleep(_POLL_S)
    new = {name: count - before.get(name, 0) for name, count in (await engine.counters()).items()}
    strange = {name: count for name, count in new.items() if count and ("skipped" in name or "broken" in name)}
    if any("block_size" in name for name in strange):
        return f"block size: its events are not about blocks of {engine.block_size} tokens"
    if strange:
        return f"event format: its KV events can't be used ({strange})"
    if not new.get("batches"):
        return _NO_EVENTS
    return _OTHER_BLOCKS + engine.or_else


async def _which_ids_differ(
    engine: Engine, encoder: Encoder, path: str, body: dict[str, Any], prompt: Prompt, unless_equal: str = ""
) -> str:
    """Compare token by token with the engine's /tokenize: first the prompt as a whole, then its plain text."""
    form: dict[str, Any] = {key: body[key] for key in ("model", "messages", "prompt", "tools") if key in body}
    theirs = await _tokenize(engine, form)
    if theirs is None:
        return unless_equal or "it counts other prompt tokens than the router (and has no /tokenize to compare with)"
    ours = [int.from_bytes(prompt.token_ids[i : i + 4], "little") for i in range(0, len(prompt.token_ids), 4)]
    if theirs == ours:
        return unless_equal or "it counts other prompt tokens than its own /tokenize gives"
    at = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), len(ours))
    text = body["prompt"] if path == COMPLETIONS else body["messages"][0]["content"]
    plain = await _tokenize(engine, {"model": body["model"], "prompt": text, "add_special_tokens": False})
    which = "template" if plain == encoder.encode_text(text) else "tokenizer"
    return f"{which}: {len(ours)} tokens here, {len(theirs)} there, the first difference is at token {at}"


async def _tokenize(engine: Engine, form: dict[str, Any]) -> list[int] | None:
    status, answer = await _ask(engine, "/tokenize", form)
    tokens = answer.get("tokens")
    return tokens if status == 200 and isinstance(tokens, list) else None


async def _repeat_problem(engine: Engine, path: str, body: dict[str, Any], prompt: Prompt) -> str:
    status, answer = await _ask(engine, path, body)
    if status != 200:
        return f"the engine refused the repeated canary: {status}"
    cached = _cached_tokens(answer)
    if cached is None:
        return "it does not report cached tokens: start it with --enable-prompt-tokens-details"
    expected = reusable_blocks(prompt.num_tokens, engine.block_size) * engine.block_size
    if cached != expected:
        hint = "; is prefix caching on?" if cached == 0 else ""
        return f"a repeated prompt of {prompt.num_tokens} tokens had {cached} cached, not {expected}{hint}"
    return ""
