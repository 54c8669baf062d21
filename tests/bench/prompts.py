"""Request bodies of a given size: plain English-like words, no two fresh ones with a common first block."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

MODEL = "bench"
_WORDS = [
    *(
        "the",
        "of",
        "and",
        "to",
        "in",
        "that",
        "for",
        "it",
        "as",
        "was",
        "with",
        "be",
        "by",
        "on",
        "not",
        "this",
        "have",
    ),
    *("from", "or", "had", "an", "they", "which", "one", "you", "were", "all", "her", "she", "there", "would", "their"),
    *("router", "replica", "engine", "prompt", "token", "block", "prefix", "cache", "latency", "request", "answer"),
    *("customer", "flight", "booking", "cancellation", "reimbursement", "throughput", "availability", "itinerary"),
]


def text(words: int, seed: object) -> str:
    """`words` words that depend on nothing but the seed; a first word that no other seed has."""
    draw = random.Random(str(seed))
    return " ".join([f"{draw.getrandbits(48):x}", *draw.choices(_WORDS, k=words - 1)])


def body(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1, **fields}).encode()


def fresh(words: int, seed: object, **fields: Any) -> bytes:
    """A chat of a system prompt and a question, unlike any other."""
    half = max(1, words // 2)
    return body(
        [{"role": "system", "content": text(half, (seed, 0))}, {"role": "user", "content": text(half, (seed, 1))}],
        **fields,
    )


def chat(words: int, seed: object, turn_words: int = 250) -> list[dict[str, Any]]:
    """A conversation of about `words` words in turns of `turn_words`, ending with the user."""
    roles = ("user", "assistant")
    turns = range(max(1, words // turn_words - 1) | 1)
    return [
        {"role": "system", "content": text(turn_words, (seed, "system"))},
        *({"role": roles[turn % 2], "content": text(turn_words, (seed, turn))} for turn in turns),
    ]


def turns(words: int, seed: object, turn_words: int = 125) -> Iterator[list[dict[str, Any]]]:
    """One conversation as it grows: each list is the one before, an answer, and the next question."""
    messages = chat(words, seed)
    for turn in range(1_000_000):
        yield list(messages)
        messages.append({"role": "assistant", "content": text(turn_words, (seed, "answer", turn))})
        messages.append({"role": "user", "content": text(turn_words, (seed, "question", turn))})
