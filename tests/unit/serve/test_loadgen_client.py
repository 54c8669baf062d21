"""Reading a stream of events as it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.loadgen.client import EventReader
from serve.loadgen.loads import BadOptions, LoadOptions
from serve.loadgen.types import Outcome

PIECE = b'data: {"choices":[{"index":0,"text":" data: x"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def read(*arrivals: bytes) -> Outcome:
    """The outcome of a stream whose pieces came at 1, 2, 3 ... seconds."""
    outcome = Outcome(0.5)
    events = EventReader(outcome)
    for at, data in enumerate(arrivals, 1):
        events.feed(data, float(at))
    events.end()
    return outcome


def test_times_are_those_of_content_and_counts_those_of_usage() -> None:
    found = read(PIECE, PIECE + PIECE, USAGE + DONE)
    assert found.ok
    assert (found.first_s, found.ttft_s) == (1.0, 0.5)
    assert list(found.gaps_s) == [1.0]
    assert (found.pieces, found.output_tokens, found.prompt_tokens, found.cached_tokens) == (3, 3, 40, 32)


def test_events_may_be_cut_anywhere_and_end_with_either_line_end() -> None:
    for cut in range(1, len(PIECE)):
        assert read(PIECE[:cut], PIECE[cut:] + DONE).pieces == 1
    assert read((PIECE + DONE).replace(b"\n", b"\r\n")).ok


def test_without_usage_pieces_stand_for_tokens() -> None:
    found = read(PIECE, PIECE, DONE)
    assert (found.output_tokens, found.cached_tokens) == (2, None)


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        ([PIECE], "ended without [DONE]"),
        ([], "ended without [DONE]"),
        (
            [PIECE, b'data: {"error":{"message":"no","type":"upstream_error"}}\n\n', DONE],
            "in the stream: upstream_error",
        ),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(stream: list[bytes], kind: str) -> None:
    assert read(*stream).error == kind


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(BadOptions, match="--rate"):
        LoadOptions(rate=1.0, concurrency=2)
    with pytest.raises(BadOptions, match="--session-times"):
        LoadOptions(session_times=Path("x"))
