"""Which headers go on, on both ways, and what is read from the end of an answer."""

from __future__ import annotations

import pytest

from serve.asgi import error_event
from serve.relay import _cached_tokens, answer_headers, request_headers, target


def names(headers: list[tuple[bytes, bytes]]) -> set[bytes]:
    return {name for name, _ in headers}


def test_what_a_connection_header_names_stays_behind() -> None:
    given = [(b"connection", b"close, X-One"), (b"x-one", b"1"), (b"connection", b"x-two"), (b"x-two", b"2")]
    given += [(b"a", b"")]
    assert names(request_headers(given)) == {b"a", b"x-request-id", b"traceparent"}


def test_repeated_headers_stay_repeated_and_in_order() -> None:
    given = [(b"Set-Cookie", b"a=1"), (b"X", b""), (b"set-cookie", b"b=2")]
    assert answer_headers(given, b"") == [(b"set-cookie", b"a=1"), (b"x", b""), (b"set-cookie", b"b=2")]


def test_framing_and_host_are_made_anew() -> None:
    given = [(b"host", b"x"), (b"content-length", b"3"), (b"transfer-encoding", b"chunked"), (b"expect", b"x")]
    assert names(request_headers(given)) == {b"x-request-id", b"traceparent"}


def test_every_request_gets_ids_of_its_own() -> None:
    one, other = dict(request_headers([])), dict(request_headers([]))
    assert one[b"x-request-id"] != other[b"x-request-id"]
    assert one[b"traceparent"] != other[b"traceparent"]


@pytest.mark.parametrize(
    ("coding", "body", "kept"),
    [
        (b"gzip", b"\x1f\x8b\x08", True),
        (b"GZIP", b"\x1f", True),
        (b"gzip", b"{", False),
        (b"gzip", b"", True),
        (b"zstd", b"\x28\xb5\x2f\xfd\x00", True),
        (b"zstd", b"{}", False),
        (b"br", b"{}", True),
        (b"identity", b"{}", True),
    ],
)
def test_h13_a_coding_is_kept_unless_the_bytes_belie_it(coding: bytes, body: bytes, kept: bool) -> None:
    assert (b"content-encoding" in names(answer_headers([(b"Content-Encoding", coding)], body))) is kept


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":32}}}', 32),
        (b'{"cache_read_input_tokens" : 7}', 7),
        (b'"cached_tokens":1 ... "cached_tokens":2', 2),
        (rb'{"content":"\"cached_tokens\": 99"}', None),
        (b'"cached_tokens":null', None),
        (b"", None),
    ],
)
def test_h7_reported_tokens_are_the_last_ones_that_no_text_made_up(tail: bytes, found: int | None) -> None:
    assert _cached_tokens(tail) == found


def test_targets_stay_as_written_below_where_the_application_is_mounted() -> None:
    scope = {"path": "/llm/v1/a b", "raw_path": b"/llm/v1/a%20b", "root_path": "/llm", "query_string": b"x=%2F"}
    assert target(scope) == b"/v1/a%20b?x=%2F"
    assert target({"path": "/v1/é", "query_string": b""}) == "/v1/é".encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_an_error_event_is_one_event_whatever_it_says(path: str) -> None:
    event = error_event(path, 'a "quote",\n\na line and 北')
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
