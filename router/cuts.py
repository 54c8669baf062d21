"""Where a rendered prompt may be cut so that its pieces, tokenised one by one, give the ids of the whole.

Tokenizers split a text at their added tokens first. Cutting just *before* such a token is therefore safe when

1. it is matched on the raw text: not `normalized`, or there is no normaliser;
2. it takes nothing from its left: no `lstrip`, no `single_word`, no whitespace or word character at its edges;
3. no other added token matched on raw text can swallow a part of it: none contains it, none ends with its beginning;
4. the tokenizer looks at nothing beyond a piece: no truncation, padding or dropout.

`prove` tests the rule's outcome against the tokenizer itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

SNIPPETS = (
    *(
        "",
        " ",
        "\n",
        "\t ",
        "  \n ",
        "a",
        "Z",
        "_",
        "é",
        "e\u0301",
        "\u0301",
        "\u200d",
        "👩\u200d👩\u200d👧",
        "한",
        "ᄒ",
        "ᅡ",
    ),
    *(
        "中文",
        "\u00a0",
        "\u3000",
        "1234",
        "|>",
        "<|",
        "<",
        ">",
        "\r\n",
        "\ufeff",
        "▁",
        "</s>",
        "\u2028",
        "ﬁ",
        "½",
        "don't",
    ),
)


def safe_cuts(tokenizer: Tokenizer) -> list[str]:
    """The added tokens before which this tokenizer's texts may be cut; empty where that can't be known."""
    if tokenizer.truncation or tokenizer.padding or tokenizer.encode_special_tokens:
        return []
    if getattr(tokenizer.model, "dropout", None):
        return []
    raw = not _normalises(tokenizer)
    added = list(tokenizer.get_added_tokens_decoder().values())
    on_raw_text = [one.content for one in added if raw or not one.normalized]
    return [
        one.content
        for one in added
        if one.content in on_raw_text
        and not (one.lstrip or one.single_word)
        and _clean_edges(one.content)
        and not any(_swallows(other, one.content) for other in on_raw_text if other != one.content)
    ]


def prove(encode: Callable[[str], Sequence[int]], joined: Callable[[str], Sequence[int]], tokens: Sequence[str]) -> str:
    """A text for which `joined` (piece by piece) differs from `encode` (whole); empty where none of some hundred does.

    `tokens`: the tokenizer's added tokens, of which the texts are made, together with what tends to go wrong.
    """
    draw = random.Random(7)
    parts = [*tokens, *(token[: len(token) // 2] for token in tokens), *(token[1:] for token in tokens)]
    for _ in range(300):
        text = "".join(draw.choice(parts if draw.random() < 0.4 else SNIPPETS) for _ in range(draw.randint(2, 24)))
        if list(encode(text)) != list(joined(text)):
            return text
    return ""


def _normalises(tokenizer: Tokenizer) -> bool:
    if tokenizer.normalizer is None:
        return False
    state = json.loads(tokenizer.normalizer.__getstate__())
    return not (state.get("type") == "Sequence" and not state.get("normalizers"))


def _clean_edges(token: str) -> bool:
    return bool(token) and not any(edge.isspace() or edge.isalnum() or edge == "_" for edge in (token[0], token[-1]))


def _swallows(other: str, token: str) -> bool:
    return token in other or any(other.endswith(token[:size]) for size in range(1, min(len(token), len(other))))
