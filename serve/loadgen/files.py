"""Files of requests: OpenAI bodies, sessions, and block traces; JSONL, plain or gzipped. Errors name file and line."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from serve.loadgen.prompts import completion, encode, streamed, token_ids
from serve.loadgen.types import CHAT_PATH, COMPLETIONS_PATH, Call, Session, TimedCall, Turn

BAILIAN_BLOCK, MOONCAKE_BLOCK = 16, 512
_CHARACTERS_A_TOKEN = 4
_TRACE_SEED = 3
_TRACE_DECODE_S = 0.02
"""Seconds an answer's token is taken to have cost in a trace that tells only when requests came."""

Row = Mapping[str, Any]


class BadFile(Exception):
    """A file of requests that can't be used; the message says which line, and why."""


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, in its order. Raises `BadFile`."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = msgspec.json.decode(line)
                    if not isinstance(row, dict):
                        raise BadFile(f"{path}, line {number}: not a JSON object")
                    yield row
    except msgspec.MsgspecError as error:
        raise BadFile(f"{path}, line {number}: {error}") from error
    except (OSError, EOFError) as error:
        raise BadFile(f"{path} can't be read: {error}") from error


def is_sessions(path: Path) -> bool:
    """Whether the file holds conversations to be played turn by turn; otherwise each line is one request's body."""
    first = next(rows(path), {})
    return first.get("kind") == "header" or "session" in first


def has_times(path: Path) -> bool:
    """Whether the file's requests say when they came."""
    return "timestamp" in next(rows(path), {})


def bodies(path: Path, model: str, *, stretch: float = 1.0) -> Iterator[TimedCall]:
    """One call a line, as it stands there but for model and streaming; due at its `timestamp` (seconds), or at once.

    Times count from the first one and are multiplied by `stretch`. Raises `BadFile`.
    """
    began: float | None = None
    for number, row in enumerate(rows(path), 1):
        body = row.get("body", row)
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise BadFile(f"{path}, request {number}: neither messages nor a prompt")
        at = float(row.get("timestamp", 0.0))
        began = at if began is None else began
        sent = {key: value for key, value in body.items() if key != "timestamp"}
        url_path = CHAT_PATH if "messages" in sent else COMPLETIONS_PATH
        yield TimedCall((at - began) * stretch, Call(url_path, encode(streamed({**sent, "model": model}))))


def trace(
    path: Path, model: str, *, block: int | None = None, stretch: float = 1.0, max_prompt: int | None = None
) -> Iterator[TimedCall]:
    """A Mooncake or Bailian trace: every hash id stands for the same tokens wherever it occurs.

    A row with `chat_id` is Bailian's (seconds, blocks of 16 tokens), one without is Mooncake's (milliseconds, 512);
    `block` overrides the size. Times count from the first row and are multiplied by `stretch`; prompts are cut to
    `max_prompt` tokens. Raises `BadFile`.
    """
    began: float | None = None
    for number, row in enumerate(rows(path), 1):
        try:
            bailian = "chat_id" in row
            at = row["timestamp"] / (1 if bailian else 1000)
            size = block or (BAILIAN_BLOCK if bailian else MOONCAKE_BLOCK)
            prompt = trace_prompt(row["hash_ids"], row["input_length"], size)
            output = max(1, row["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadFile(f"{path}, request {number}: not a row of a trace ({error!r})") from error
        began = at if began is None else began
        yield TimedCall((at - began) * stretch, completion(model, prompt[:max_prompt], output))


def trace_prompt(hash_ids: Sequence[int], length: int, block: int) -> list[int]:
    """`length` token ids: one block for each hash id, the last one cut. Raises ValueError where they don't fit."""
    if not 0 < length <= len(hash_ids) * block:
        raise ValueError(f"{len(hash_ids)} blocks of {block} can't be a prompt of {length} tokens")
    ids = [token for hash_id in hash_ids for token in _block(hash_id, block)]
    return ids[:length]


@lru_cache(maxsize=50_000)
def _block(hash_id: int, size: int) -> tuple[int, ...]:
    return tuple(token_ids((_TRACE_SEED, hash_id), size))


def session_bodies(path: Path) -> list[list[dict[str, Any]]]:
    """Every conversation as the bodies that a client posts one after the other: one before each recorded answer.

    A header line's system prompt and tools are shared by all. Raises `BadFile`.
    """
    found: list[list[dict[str, Any]]] = []
    system: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    for number, row in enumerate(rows(path), 1):
        if row.get("kind") == "header":
            system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
            shared = {"tools": row["tools"]} if row.get("tools") else {}
            continue
        messages = row.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
            raise BadFile(f"{path}, line {number}: messages must be a list of objects")
        answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        asked = [
            {"messages": [*system, *messages[:index]], **shared, "max_tokens": _tokens(messages[index])}
            for index in answers
            if system or index
        ]
        if asked:
            found.append(asked)
    return found


def chats(path: Path) -> list[list[Row]]:
    """A Bailian trace's requests by conversation, in the order in which the conversations begin. Raises `BadFile`."""
    roots: dict[int, int] = {}
    found: dict[int, list[Row]] = {}
    for number, row in enumerate(rows(path), 1):
        try:
            parent, own = row["parent_chat_id"], row["chat_id"]
        except KeyError as error:
            raise BadFile(f"{path}, line {number}: not a row of a trace with chats (no {error})") from error
        roots[own] = own if parent < 0 else roots.get(parent, parent)
        found.setdefault(roots[own], []).append(row)
    return list(found.values())


def timed_sessions(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    timing: Sequence[Sequence[Row]],
    model: str,
    *,
    decode_s: float = _TRACE_DECODE_S,
) -> list[Session]:
    """Conversations at the times, and with the answer lengths, of a trace's chats.

    Each chat gets the conversation of as many turns whose prompts grow most like its own. Think times are what lies
    between two requests of a chat less `decode_s` for each token of the answer. A conversation without a chat, and a
    chat without a conversation, is left out.
    """
    left = [(conversation, _growth(conversation)) for conversation in conversations]
    found = []
    began = timing[0][0]["timestamp"] if timing else 0.0
    for chat in timing:
        lengths = [row["input_length"] for row in chat]
        steps = [later - earlier for earlier, later in pairwise(lengths)]
        fitting = [index for index, (turns, _) in enumerate(left) if len(turns) == len(chat)]
        if not fitting:
            continue
        best = min(fitting, key=lambda index: sum(abs(a - b) for a, b in zip(steps, left[index][1], strict=True)))
        conversation, _ = left.pop(best)
        found.append(Session(chat[0]["timestamp"] - began, _turns(conversation, chat, model, decode_s)))
    return found


def untimed_sessions(
    conversations: Sequence[Sequence[Mapping[str, Any]]], model: str, *, think_s: float = 0.0
) -> list[Session]:
    """The same conversations without recorded times: `think_s` before every turn but the first."""
    return [
        Session(0.0, [Turn(think_s if number else 0.0, chat_call(model, body)) for number, body in enumerate(bodies)])
        for bodies in conversations
    ]


def chat_call(model: str, body: Mapping[str, Any]) -> Call:
    """A streamed chat whose answer has exactly `max_tokens` tokens, if the body has that field."""
    exact = {"ignore_eos": True} if "max_tokens" in body else {}
    return Call(CHAT_PATH, encode(streamed({"model": model, **body, **exact})))


def _turns(conversation: Sequence[Mapping[str, Any]], chat: Sequence[Row], model: str, decode_s: float) -> list[Turn]:
    turns = []
    before: Row | None = None
    for body, row in zip(conversation, chat, strict=True):
        busy = 0.0 if before is None else before["timestamp"] + before["output_length"] * decode_s
        think = 0.0 if before is None else max(0.0, row["timestamp"] - busy)
        turns.append(Turn(think, chat_call(model, {**body, "max_tokens": max(1, row["output_length"])})))
        before = row
    return turns


def _growth(conversation: Sequence[Mapping[str, Any]]) -> list[float]:
    """About how many tokens each prompt is longer than the one before."""
    sizes = [len(encode(body["messages"])) / _CHARACTERS_A_TOKEN for body in conversation]
    return [later - earlier for earlier, later in pairwise(sizes)]


def _tokens(message: Mapping[str, Any]) -> int:
    said = message.get("content") or encode(message.get("tool_calls") or "").decode()
    return max(1, len(str(said)) // _CHARACTERS_A_TOKEN)
