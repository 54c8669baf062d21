from __future__ import annotations

from collections.abc import Sequence

import pytest

from replicas.emulated.block_hashes import BlockChain
from replicas.emulated.choices import Choice, Stop, find_stop, text_offsets
from replicas.emulated.scheduler import EngineRequest
from replicas.emulated.text import Answer

TEXTS = ["One", " two", " three", " four"]


def choice(stops: Sequence[str] = (), *, echo: bool = False, echo_only: bool = False) -> Choice:
    stop = find_stop(TEXTS, stops, include=False)
    answer = Answer(list(enumerate(TEXTS)), [(9, " more")], seed=1)
    count = stop.num_tokens if stop else len(TEXTS)
    request = EngineRequest("r", BlockChain([7, 8], 16), count, answer, finish_reason="stop")
    for _ in range(count):
        next(answer)
    hold_back = max(map(len, stops), default=1) - 1
    return Choice(0, request, answer, str, (7, 8) if echo else (), echo_only, hold_back, stop)


def streamed(one: Choice) -> list[str]:
    count = len(one.answer.texts)
    return [one.token_text(position, last=position == count) for position in range(1, count + 1)]


@pytest.mark.parametrize(
    ("stops", "include", "min_tokens", "expected"),
    [
        (["two"], False, 0, Stop("two", 2, 4)),
        (["two"], True, 0, Stop("two", 2, 7)),
        (["e t"], False, 0, Stop("e t", 2, 2)),
        (["three", "two"], False, 0, Stop("two", 2, 4)),
        (["hree four"], False, 0, Stop("hree four", 4, 9)),
        (["five"], False, 0, None),
        ([], False, 0, None),
        # What was said before the least number of tokens stops nothing later on.
        (["One"], False, 3, None),
        (["ee"], False, 3, Stop("ee", 3, 11)),
    ],
)
def test_a_stop_string_is_found_wherever_tokens_end(
    stops: list[str], include: bool, min_tokens: int, expected: Stop | None
) -> None:
    assert find_stop(TEXTS, stops, include=include, min_tokens=min_tokens) == expected


@pytest.mark.parametrize("stops", [[], ["o"], ["two"], ["e t"], ["hree four"], ["five"], ["four", "x" * 40]])
def test_a_stream_shows_what_the_whole_answer_shows(stops: list[str]) -> None:
    one = choice(stops)
    assert "".join(streamed(one)) == one.whole_text()
    assert not any(stop in one.whole_text() for stop in stops)


def test_characters_that_may_begin_a_stop_string_are_held_back() -> None:
    assert streamed(choice(["xxx"])) == ["O", "ne t", "wo thr", "ee four"]


def test_an_echo_goes_before_the_first_token_or_stands_alone() -> None:
    assert streamed(choice(echo=True))[0] == "(7, 8)One"
    assert choice(echo=True).whole_text() == "(7, 8)One two three four"
    assert choice(echo=True, echo_only=True).whole_text() == "(7, 8)"


def test_offsets_are_where_texts_begin() -> None:
    assert text_offsets(["ab", "", "c"], 5) == [5, 7, 7]
    assert text_offsets([]) == []
