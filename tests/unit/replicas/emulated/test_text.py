from __future__ import annotations

from collections.abc import Sequence

import pytest

from replicas.emulated.text import OPENING, EmulatedText
from router.prompt import PromptEncoder


class Characters:
    """A tokenizer with one token a character: no word is a single token."""

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Lossy(Characters):
    """One token a word, but decoding loses them."""

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return ""


@pytest.fixture(scope="module")
def text() -> EmulatedText:
    return EmulatedText(PromptEncoder.load("any", "builtin"))


def taken(text: EmulatedText, seed: int, count: int, *, chat: bool = True) -> tuple[list[int], str]:
    answer = text.answer(seed, chat=chat)
    ids = [next(answer) for _ in range(count)]
    return ids, "".join(answer.texts)


def test_an_answer_opens_with_the_sentence_and_goes_on_with_words(text: EmulatedText) -> None:
    _, sentence = taken(text, 1, text.natural_length(chat=True))
    assert sentence == OPENING
    _, longer = taken(text, 1, text.natural_length(chat=True) + 5)
    assert longer.startswith(OPENING + " ")


def test_a_completion_starts_with_a_space(text: EmulatedText) -> None:
    _, sentence = taken(text, 1, text.natural_length(chat=False), chat=False)
    assert sentence == f" {OPENING}"


def test_seeds_choose_the_words(text: EmulatedText) -> None:
    assert taken(text, 1, 60) == taken(text, 1, 60)
    assert taken(text, 1, 60) != taken(text, 2, 60)


@pytest.mark.parametrize(("tokenizer", "reason"), [(Characters(), "too few"), (Lossy(), "doesn't give back")])
def test_a_tokenizer_that_would_not_give_the_ids_back_is_refused(tokenizer: Characters, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EmulatedText(tokenizer)
