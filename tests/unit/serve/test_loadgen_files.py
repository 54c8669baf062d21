"""Files of requests: what is read from them, and how they are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from serve.loadgen.files import (
    BadFile,
    bodies,
    chats,
    has_times,
    is_sessions,
    rows,
    session_bodies,
    timed_sessions,
    trace,
    trace_prompt,
    untimed_sessions,
)
from serve.loadgen.types import CHAT_PATH, COMPLETIONS_PATH, Call


def write(folder: Path, *lines: Any, name: str = "file.jsonl") -> Path:
    path = folder / name
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def sent(call: Call) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(call.body)
    return body


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


HEADER = {"kind": "header", "system": "Be kind.", "tools": [{"type": "function", "function": {"name": "look"}}]}
TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TALK = [
    user("Hello"),
    assistant(None, tool_calls=[TOOL_CALL]),
    {"role": "tool", "tool_call_id": "1", "content": "a tree"},
    assistant("I see a tree."),
    user("Thanks"),
]


@pytest.mark.parametrize("name", ["file.jsonl", "file.jsonl.gz"])
def test_plain_and_gzipped_lines_are_read_and_empty_ones_skipped(tmp_path: Path, name: str) -> None:
    assert list(rows(write(tmp_path, {"a": 1}, "", {"b": 2}, name=name))) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(("line", "what"), [("{", "line 2"), ("[1]", "line 2: not a JSON object")])
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(BadFile, match=what):
        list(rows(write(tmp_path, {"a": 1}, line)))


def test_a_missing_file_and_one_that_is_not_gzip_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="can't be read"):
        list(rows(tmp_path / "none.jsonl"))
    (tmp_path / "not.gz").write_text("plain")
    with pytest.raises(BadFile, match="can't be read"):
        list(rows(tmp_path / "not.gz"))


def test_conversations_are_told_from_bodies(tmp_path: Path) -> None:
    assert is_sessions(write(tmp_path, HEADER))
    assert is_sessions(write(tmp_path, {"session": "a", "messages": TALK}))
    assert not is_sessions(write(tmp_path, {"messages": TALK}))
    assert not is_sessions(write(tmp_path))


def test_bodies_keep_their_fields_and_times(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"timestamp": 5, "model": "other", "messages": TALK, "seed": 7}, {"timestamp": 7.5, "prompt": [1, 2]}
    )
    assert has_times(path)
    first, second = bodies(path, "mine", stretch=2.0)
    assert (first.at, second.at) == (0.0, 5.0)
    assert (first.call.path, second.call.path) == (CHAT_PATH, COMPLETIONS_PATH)
    body = sent(first.call)
    assert body == {
        "model": "mine",
        "messages": TALK,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_line_that_asks_for_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="request 2: neither messages nor a prompt"):
        list(bodies(write(tmp_path, {"prompt": "a"}, {"question": "b"}), "m"))


def test_a_mooncake_row_has_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    rows_ = [
        {"timestamp": 1000, "input_length": 1000, "output_length": 3, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 512, "output_length": 0, "hash_ids": [7]},
    ]
    first, second = trace(write(tmp_path, *rows_), "m", stretch=3.0)
    assert (first.at, second.at) == (0.0, 1.5)
    one, other = sent(first.call)["prompt"], sent(second.call)["prompt"]
    assert (len(one), len(other)) == (1000, 512)
    assert one[:512] == other
    assert len(set(map(tuple, (one[:256], one[256:512], one[512:768])))) == 3
    assert (sent(first.call)["max_tokens"], sent(second.call)["max_tokens"]) == (3, 1)
    assert first.call.prompt_tokens == 1000


def test_a_bailian_row_has_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    row = {"chat_id": 0, "timestamp": 2.0, "input_length": 30, "output_length": 3, "hash_ids": [1, 2]}
    first, second = trace(write(tmp_path, row, {**row, "timestamp": 3.0}), "m", max_prompt=20)
    assert (first.at, second.at) == (0.0, 1.0)
    assert first.call.prompt_tokens == 20
    (other,) = trace(write(tmp_path, {**row, "hash_ids": [1]}), "m", block=32)
    assert other.call.prompt_tokens == 30


@pytest.mark.parametrize("row", [{"timestamp": 0}, {"timestamp": 0, "input_length": 600, "hash_ids": [1]}])
def test_a_row_that_is_no_trace_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(BadFile, match="request 1: not a row of a trace"):
        list(trace(write(tmp_path, row), "m"))
    with pytest.raises(ValueError, match="can't be a prompt of 0 tokens"):
        trace_prompt([1], 0, 16)


def test_every_answer_of_a_conversation_is_one_request(tmp_path: Path) -> None:
    ((first, second),) = session_bodies(write(tmp_path, HEADER, {"session": "a", "messages": TALK}))
    system = {"role": "system", "content": "Be kind."}
    assert first["messages"] == [system, TALK[0]]
    assert second["messages"] == [system, *TALK[:3]]
    assert first["tools"] == second["tools"] == HEADER["tools"]
    (session,) = untimed_sessions([[first, second]], "m", think_s=2.0)
    assert [turn.think_s for turn in session.turns] == [0.0, 2.0]
    body = sent(session.turns[1].call)
    assert (body["model"], body["ignore_eos"], body["max_tokens"]) == ("m", True, len("I see a tree.") // 4)


def test_without_a_header_an_opening_by_the_assistant_is_no_request(tmp_path: Path) -> None:
    talk = [assistant("Hello"), user("Hi"), assistant("Well?")]
    (asked,) = session_bodies(write(tmp_path, {"session": "a", "messages": talk}))
    assert [body["messages"] for body in asked] == [talk[:2]]
    with pytest.raises(BadFile, match="line 1: messages must be"):
        session_bodies(write(tmp_path, {"session": "a", "messages": "no"}))


def chat(start: float, *rows: tuple[float, int, int], first_id: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "chat_id": first_id + number,
            "parent_chat_id": first_id + number - 1 if number else -1,
            "timestamp": start + at,
            "input_length": length,
            "output_length": output,
        }
        for number, (at, length, output) in enumerate(rows)
    ]


def test_chats_are_put_together_by_their_parents(tmp_path: Path) -> None:
    one, other = chat(1.0, (0, 10, 5), (2, 20, 5)), chat(1.5, (0, 11, 5), first_id=9)
    found = chats(write(tmp_path, one[0], other[0], one[1]))
    assert found == [one, other]
    with pytest.raises(BadFile, match="no 'parent_chat_id'"):
        chats(write(tmp_path, {"chat_id": 1}))


def conversation(*sizes: int) -> list[dict[str, Any]]:
    return [{"messages": [user("x" * size)]} for size in sizes]


def test_conversations_get_the_times_of_the_chat_that_grows_alike() -> None:
    short, long = conversation(400, 800), conversation(400, 8000)
    timing = [
        chat(10.0, (0, 100, 50), (3, 2000, 10)),  # grows by 1,900 tokens: the long one
        chat(12.0, (0, 100, 200), (3, 200, 10), first_id=5),
        chat(13.0, (0, 100, 1), first_id=8),  # nobody has one turn
    ]
    first, second = timed_sessions([short, long], timing, "m")
    assert (first.at, second.at) == (0.0, 2.0)
    assert sent(first.turns[1].call)["messages"] == long[1]["messages"]
    assert [turn.think_s for turn in first.turns] == [0.0, pytest.approx(2.0)]
    assert second.turns[1].think_s == 0.0
    assert sent(second.turns[0].call)["max_tokens"] == 200
