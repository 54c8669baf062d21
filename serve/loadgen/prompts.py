"""Prompts made of token ids, so that their length is exact with any tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from serve.loadgen.types import COMPLETIONS_PATH, Call

_LOWEST_ID, _HIGHEST_ID = 1_000, 31_000
"""Ordinary tokens of every vocabulary in use: special ones lie at its ends, and the smallest has 32,000."""

encode = msgspec.json.Encoder().encode


def token_ids(seed: Sequence[int], count: int) -> list[int]:
    """`count` ids that depend on nothing but the seed, a few non-negative numbers; other seeds give other ids."""
    ids: list[int] = np.random.default_rng(list(seed)).integers(_LOWEST_ID, _HIGHEST_ID, count).tolist()
    return ids


def completion(model: str, prompt: list[int], output_tokens: int, **fields: Any) -> Call:
    """A streamed completion of exactly `output_tokens` tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    return Call(COMPLETIONS_PATH, encode(streamed({**body, **fields})), len(prompt))


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body, asking for a stream with usage at its end."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Requests that each begin with one of `prefixes` shared prompts.

    Lengths in tokens. `unshared_tokens` and `output_tokens` are means; `spread` is the standard deviation of both over
    their means, 0 for fixed lengths.
    """

    shared_tokens: int = 4096
    unshared_tokens: int = 950
    output_tokens: int = 670
    prefixes: int = 1
    spread: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared_tokens < 0 or self.unshared_tokens < 1 or self.output_tokens < 1 or self.prefixes < 1:
            raise ValueError("a request has at least one unshared and one output token, and one prefix to choose from")

    def calls(self, model: str) -> Iterator[Call]:
        """Without end. The shared prompts are drawn evenly; the same seed gives the same requests."""
        draw = random.Random(self.seed)
        shared = [token_ids((self.seed, 1, which), self.shared_tokens) for which in range(self.prefixes)]
        number = 0
        while True:
            unshared = max(1, round(draw.gauss(self.unshared_tokens, self.unshared_tokens * self.spread)))
            output = max(1, round(draw.gauss(self.output_tokens, self.output_tokens * self.spread)))
            prefix = shared[draw.randrange(self.prefixes)]
            yield completion(model, prefix + token_ids((self.seed, 2, number), unshared), output)
            number += 1
