"""The seam between a generation and the API that a client speaks: a form turns tokens into that API's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from replicas.emulated.api import Generation
from replicas.emulated.choices import Choice
from replicas.emulated.errors import ApiError
from replicas.emulated.logprobs import Alternatives

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What there is to answer. `body` is the client's own; `created` in seconds since 1970."""

    id: str
    created: int
    generation: Generation
    choices: Sequence[Choice]
    body: Mapping[str, Any]
    alternatives: Alternatives = ()

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts, each counted once however many choices it has."""
        return sum(choice.request.num_prompt for choice in self.choices) // self.generation.n

    @property
    def num_generated(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


class Form(Protocol):
    """`first` is the choice that had its first token first."""

    def begin(self) -> list[bytes]:
        """Events before any token's."""

    def token(self, choice: Choice, position: int, *, last: bool) -> bytes:
        """Events of a choice's `position`-th token, counted from 1; empty where it shows nothing."""

    def end(self, first: Choice) -> bytes:
        """Events after the last token's."""

    def whole(self) -> Any:
        """The JSON answer in one piece."""

    def error_event(self, error: ApiError) -> bytes:
        """What ends a stream that can't go on."""


def data_event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def named_event(kind: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(data))


def cached_and_created(choice: Choice) -> tuple[int, int]:
    """Prompt tokens that came from the cache, and those that are in it now but weren't."""
    request = choice.request
    cached, size = request.cached_tokens or 0, request.chain.block_size
    return cached, request.num_prompt // size * size - cached
