"""What an emulated engine answers: a sentence that says so, then common words, as token ids and as text.

An answer comes back as part of the next turn's prompt and must then have the ids that were generated, wherever it was
cut. So the opening is taken only if each of its prefixes tokenises to itself, and the words only if each is one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

OPENING = "This text was emulated by whohas; no model ran."

_WORDS = """
a about after again air all also always an and animal another answer any are around as ask at away back be because
been before began being best better between big book both boy but by call came can car change children city close
cold come could country day did different do does done door down each early earth easy eat end enough even ever every
eye face family far father feel few find fire first fish five follow food for form found four friend from full game
gave get girl give go good got great group grow had half hand hard has have he head hear help her here high him his
home horse hot hour house how idea if important in is it just keep kind know land large last late learn left letter
life light like line list little live long look love made make man many may me mean might mile money more morning
most mother mountain move much music must my name near need never new next night no north not note now number of off
often old on once one only open or other our out over own page paper part people place plan plant play point put
question quick rain read real red rest right river road room run said same saw say school sea second see seem sentence
set several she short should show side small snow so some song soon south stand star start state stay still stood stop
story street strong study such summer sun sure table take talk tell ten than that the their them then there these
they thing think this those thought three through time to today together told too took top toward town travel tree
true try turn two under until up upon us use very voice walk want war warm was watch water way we week well went were
what when where which while white who whole why will wind winter wish with without wood word work world would write
year yes yet you young your
""".split()  # noqa: SIM905 (a quoted list of four hundred words is no easier to read)

_MIN_WORDS = 32
_MASK = (1 << 64) - 1


class Tokenizer(Protocol):
    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Answer(Iterator[int]):
    """Endless ids of one answer; `texts[k]` is the text of the k-th id that was taken."""

    def __init__(self, opening: Sequence[tuple[int, str]], words: Sequence[tuple[int, str]], seed: int) -> None:
        self.texts: list[str] = []
        self._opening = opening
        self._words = words
        self._state = seed & _MASK

    def __next__(self) -> int:
        position = len(self.texts)
        if position < len(self._opening):
            token, text = self._opening[position]
        else:
            # Knuth's MMIX generator; its low bits have short periods, so the high ones choose.
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) & _MASK
            token, text = self._words[(self._state >> 33) % len(self._words)]
        self.texts.append(text)
        return token


class EmulatedText:
    """Answers in one tokenizer's ids. Raises ValueError for a tokenizer with which that can't be done."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        encode = tokenizer.encode_text
        self._words = [(ids[0], f" {word}") for word in _WORDS if len(ids := encode(f" {word}")) == 1]
        if len(self._words) < _MIN_WORDS:
            raise ValueError("the tokenizer has too few single-token English words to emulate text with")
        self._chat = _closed_opening(tokenizer, OPENING)
        # A completion continues its prompt: after a space, the prompt's last word can't grow into the first one.
        self._completion = _closed_opening(tokenizer, f" {OPENING}")
        for opening in (self._chat, self._completion):
            _prove(encode, Answer(opening, self._words, seed=1), len(opening) + 4 * len(self._words))

    def natural_length(self, *, chat: bool) -> int:
        """Tokens after which an answer ends by itself."""
        return len(self._chat if chat else self._completion)

    def alternatives(self, count: int) -> list[tuple[int, str]]:
        """`count` tokens, ids and texts, that might have come instead of any other."""
        return self._words[:count]

    def answer(self, seed: int, *, chat: bool) -> Answer:
        return Answer(self._chat if chat else self._completion, self._words, seed)


def _closed_opening(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    """Ids and texts of `text`, which every cut must leave tokenising to the same ids."""
    ids = tokenizer.encode_text(text)
    cuts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
    if cuts[-1] != text or any(tokenizer.encode_text(cut) != ids[:count] for count, cut in enumerate(cuts)):
        raise ValueError(f"the tokenizer doesn't give back the ids of {text!r} when it is cut")
    return [(token, cuts[index + 1][len(cuts[index]) :]) for index, token in enumerate(ids)]


def _prove(encode: Callable[[str], list[int]], answer: Answer, length: int) -> None:
    ids = [next(answer) for _ in range(length)]
    if encode("".join(answer.texts)) != ids:
        raise ValueError("the tokenizer joins words of the emulated text into other tokens")
