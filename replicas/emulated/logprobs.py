"""Log-probabilities in vLLM's shapes. Their values are constants: no model ran that could tell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicas.emulated.choices import text_offsets

TAKEN = -0.25
"""Of every token that was taken."""

Alternatives = Sequence[tuple[int, str]]
"""Ids and texts of what might have come instead, likeliest first."""


def of_alternative(rank: int) -> float:
    """`rank` counts from 1, the taken token's place."""
    return TAKEN - rank


def chat_entries(texts: Sequence[str], alternatives: Alternatives) -> list[dict[str, Any]]:
    """`content` of a chat's log-probabilities; the taken token leads its own alternatives, and counts as one."""
    return [
        {
            **_entry(text, TAKEN),
            "top_logprobs": [
                _entry(other, TAKEN if rank == 0 else of_alternative(rank))
                for rank, other in enumerate(_ranked(text, alternatives))
            ],
        }
        for text in texts
    ]


def completion_logprobs(texts: Sequence[str], alternatives: Alternatives, offset: int, *, first: bool) -> Any:
    """Log-probabilities of a completion's tokens from character `offset` on; a prompt's `first` token has none."""
    top = [
        {text: TAKEN} | {other: of_alternative(rank) for rank, (_, other) in enumerate(alternatives, start=1)}
        for text in texts
    ]
    none = [None] if first and texts else []
    return {
        "text_offset": text_offsets(texts, offset),
        "token_logprobs": [*none, *([TAKEN] * (len(texts) - len(none)))],
        "tokens": list(texts),
        "top_logprobs": [*none, *top[len(none) :]],
    }


def prompt_logprobs(ids: Sequence[int], texts: Sequence[str], alternatives: Alternatives) -> list[Any]:
    """One map a prompt token from ids to what is known of them; None for the first."""
    return [
        None,
        *(
            {
                str(token): _ranked_entry(text, TAKEN, 1),
                **{
                    str(other): _ranked_entry(word, of_alternative(rank), rank + 1)
                    for rank, (other, word) in enumerate(alternatives, start=1)
                    if other != token
                },
            }
            for token, text in zip(ids[1:], texts[1:], strict=True)
        ),
    ]


def _ranked(text: str, alternatives: Alternatives) -> list[str]:
    others = [other for _, other in alternatives if other != text]
    return [text, *others][: len(alternatives)]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _ranked_entry(text: str, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
