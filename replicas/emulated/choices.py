"""One sequence of a response: what a client sees of each token that the engine generates for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from replicas.emulated.api import Generation
from replicas.emulated.scheduler import EngineRequest
from replicas.emulated.text import Answer
from replicas.emulated.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a stop string ends an answer: after `num_tokens` tokens, with `visible` characters to be seen."""

    text: str
    num_tokens: int
    visible: int


def find_stop(texts: Iterable[str], stops: Sequence[str], *, include: bool, min_tokens: int = 0) -> Stop | None:
    """The first stop string in an answer of these tokens; before `min_tokens` nothing stops it."""
    longest = max(map(len, stops), default=0)
    said = ""
    for count, text in enumerate(texts, start=1):
        before, said = len(said), said + text
        if count < min_tokens:
            continue
        for stop in stops:
            at = said.find(stop, max(0, before - longest + 1))
            if at >= 0:
                return Stop(stop, count, at + (len(stop) if include else 0))
    return None


@dataclass(slots=True)
class Choice:
    """Positions count an answer's tokens from 1, and have to be asked for in their order.

    `echo_ids` is the prompt where it is to be repeated; `echo_only` hides what is generated behind it. `hold_back`
    characters at the end of a stream may yet turn out to be the beginning of a stop string.
    """

    index: int
    request: EngineRequest
    answer: Answer | ToolCall
    decode: Callable[[Sequence[int]], str]
    echo_ids: Sequence[int] = ()
    echo_only: bool = False
    hold_back: int = 0
    stop: Stop | None = None
    _shown: int = field(default=0, init=False)
    _length: int = field(default=0, init=False)

    @property
    def call(self) -> ToolCall | None:
        return self.answer if isinstance(self.answer, ToolCall) else None

    @property
    def completion_tokens(self) -> int:
        return 0 if self.echo_only else self.request.num_generated

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.request.chain.token_ids(0, self.request.num_prompt)

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the answer, once it has ended."""
        return self.stop.text if self.stop and self.request.finish_reason == "stop" else None

    def finish_reason(self, generation: Generation) -> str:
        """The engine's, save that a call that came to its end says so; a named one doesn't, as with vLLM."""
        reason = self.request.finish_reason
        asked = generation.call
        return "tool_calls" if reason == "stop" and asked is not None and not asked.named else reason

    def generated_ids(self) -> Sequence[int]:
        start = self.request.num_prompt
        return self.request.chain.token_ids(start, start + self.completion_tokens)

    def id_at(self, position: int) -> int:
        at = self.request.num_prompt + position - 1
        return self.request.chain.token_ids(at, at + 1)[0]

    def token_text(self, position: int, *, last: bool) -> str:
        """What the `position`-th token adds to a stream; the echo goes before the first."""
        text = "" if self.echo_only else self._added(self.answer.texts[position - 1], last)
        return self.decode(self.echo_ids) + text if position == 1 and self.echo_ids else text

    def whole_text(self) -> str:
        echo = self.decode(self.echo_ids) if self.echo_ids else ""
        if self.echo_only:
            return echo
        text = "".join(self.answer.texts)
        return echo + (text if self.stop is None else text[: self.stop.visible])

    def _added(self, text: str, last: bool) -> str:
        if not self.hold_back and self.stop is None:
            return text
        self._length += len(text)
        end = self._length if last else max(self._shown, self._length - self.hold_back)
        if self.stop is not None:
            end = min(end, self.stop.visible)
        start, self._shown = self._shown, end
        return "".join(self.answer.texts)[start:end]


def text_offsets(texts: Sequence[str], start: int = 0) -> list[int]:
    """Where each text begins when they follow one another, in characters."""
    return list(accumulate(map(len, texts[:-1]), initial=start)) if texts else []
