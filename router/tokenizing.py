"""Text to token ids: the model's own tokenizer, and a faster one once it has proven to be equal.

`tokenizers` (Hugging Face) is the reference and is used from the first request on. `fastokens` takes seconds to load,
so it is built in a thread, compared with the reference on some hundred awkward texts, and only then takes over.
"""

from __future__ import annotations

import logging
import random
import threading
from array import array
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from router.cuts import SNIPPETS, prove, safe_cuts

logger = logging.getLogger("whohas.tokenizer")

Ids = Callable[[str], list[int]]


class TextEncoder:
    """`ids` and `packed` never add special tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, fast: bool = True) -> None:
        self._tokenizer = tokenizer
        self._ids: Ids = self._reference
        self.backend = "tokenizers"
        self.why = ""  # why not the faster one
        self.cuts: Sequence[str] = ()
        added = [one.content for one in tokenizer.get_added_tokens_decoder().values()]
        if cuts := safe_cuts(tokenizer):
            wrong = prove(self._reference, lambda text: self._joined(text, cuts), added)
            if wrong:
                logger.warning("prompts are tokenised whole: cut into pieces %r has other ids", wrong)
            else:
                self.cuts = cuts
        self.prover = threading.Thread(target=self._adopt_faster, args=(added,), name="whohas-tokenizer", daemon=True)
        if fast:
            self.prover.start()

    def ids(self, text: str) -> list[int]:
        """Raises UnicodeError or TypeError for text that isn't Unicode (lone surrogates), ValueError if Rust panics."""
        try:
            return self._ids(text)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # no Exception, and not to be told apart by its class
                raise
            raise ValueError(f"the tokenizer panicked: {error}") from error

    def packed(self, text: str) -> bytes:
        """Ids as little-endian uint32."""
        return array("I", self.ids(text)).tobytes()

    def _reference(self, text: str) -> list[int]:
        # The batch call frees the interpreter for other threads, and skips the offsets that nobody reads here.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _joined(self, text: str, cuts: Sequence[str]) -> list[int]:
        pieces, rest = [], text
        while rest:
            at = min((found for cut in cuts if (found := rest.find(cut, 1)) > 0), default=len(rest))
            pieces.append(rest[:at])
            rest = rest[at:]
        return [one for piece in pieces for one in self._reference(piece)]

    def _adopt_faster(self, added: Sequence[str]) -> None:
        try:
            from fastokens._native import Tokenizer as FastTokenizer

            faster = FastTokenizer.from_json_str(self._tokenizer.to_str())

            def ids(text: str) -> list[int]:
                return list(faster.encode(text, False).ids)

            wrong = _difference(self._reference, ids, added)
        except ImportError:
            self.why = "fastokens is not installed"
        except Exception as error:  # a third party's loader: whatever it is, the reference goes on
            self.why = f"fastokens can't load this tokenizer: {error}"
        else:
            if wrong:
                self.why = f"fastokens has other ids for {wrong!r}"
            else:
                self._ids, self.backend = ids, "fastokens"
        logger.info("tokenising with %s", f"tokenizers: {self.why}" if self.why else self.backend)


def _difference(reference: Ids, other: Ids, added: Sequence[str]) -> str:
    """A text whose ids differ, empty where none of some hundred does."""
    draw = random.Random(11)
    words = [
        "the",
        " of",
        " answer",
        "\n\n",
        "def f(x):",
        " 3.14",
        "日本語",
        " naïve",
        "🙂",
        "\u00a0",
        '{"a": 1}',
        *added,
    ]
    for _ in range(400):
        text = "".join(draw.choice(words if draw.random() < 0.6 else SNIPPETS) for _ in range(draw.randint(1, 40)))
        if reference(text) != other(text):
            return text
    return ""
