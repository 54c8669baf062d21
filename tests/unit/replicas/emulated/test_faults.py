"""Faults on a stand-in for the engine's application; those that end the process are in the integration tests."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from replicas.emulated.faults import FAULT_HEADER, FaultInjector, Faults, parse_faults

CHUNKS = [b"data: 1\n\n", b"data: \xe5\x8c\x97\n\ndata: 3\n\n", b"data: [DONE]\n\n"]
JSON = b'{"text": "' + b"x" * 1000 + b'"}'
ERROR = json.loads('{"message":"A fault that was asked for.","type":"InternalServerError","param":null,"code":500}')


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for index, chunk in enumerate(CHUNKS):
        await send({"type": "http.response.body", "body": chunk, "more_body": index < len(CHUNKS) - 1})


async def whole(scope: Scope, receive: Receive, send: Send) -> None:
    length = b"%d" % len(JSON)
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": JSON})


class Client:
    def __init__(self, app: Any, faults: Faults | None = None, *, allow_header: bool = False) -> None:
        self._app = FaultInjector(app, faults or Faults(), allow_header=allow_header)
        self.got: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.status = 0
        self.gone = asyncio.Event()

    async def __call__(self, path: str = "/v1/completions", **headers: str) -> bytes:
        self.got = []
        named = {"x_emulate_fault": FAULT_HEADER, "accept_encoding": "accept-encoding"}
        raw = [(named[key].encode(), value.encode()) for key, value in headers.items()]
        await self._app({"type": "http", "path": path, "headers": raw}, self._receive, self._send)
        return b"".join(self.got)

    async def _receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {key.decode(): value.decode() for key, value in message["headers"]}
        elif message.get("body"):
            self.got.append(message["body"])


async def test_nothing_happens_unless_asked_for() -> None:
    client = Client(stream)
    assert await client(x_emulate_fault='{"status": 500}') == b"".join(CHUNKS)
    assert client.got == CHUNKS


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_is_answered_instead(status: int) -> None:
    client = Client(stream, Faults(status=status))
    assert json.loads(await client())["error"]["code"] == client.status == status
    assert await client("/health") == b"".join(CHUNKS)


async def test_a_rate_is_kept_exactly() -> None:
    client = Client(whole, Faults(status=503, rate=0.1))
    statuses = []
    for _ in range(50):
        await client()
        statuses.append(client.status)
    assert statuses.count(503) == 5


async def test_a_request_brings_its_own_faults_where_that_is_allowed() -> None:
    client = Client(stream, Faults(status=503), allow_header=True)
    assert await client(x_emulate_fault="{}") == b"".join(CHUNKS)
    await client()
    assert client.status == 503
    await client(x_emulate_fault='{"stat": 1}')
    assert client.status == 400


@pytest.mark.parametrize("count", [0, 1, 2, 3])
async def test_a_stream_ends_with_an_error_event_after_so_many_chunks(count: int) -> None:
    client = Client(stream, Faults(error_after_chunk=count))
    *events, error, rest = (await client()).split(b"\n\n")
    assert (len(events), rest) == (count, b"")
    assert json.loads(error.removeprefix(b"data: "))["error"] == ERROR


async def test_the_messages_api_gets_its_own_kind_of_error_event() -> None:
    answer = await Client(stream, Faults(error_after_chunk=0))("/v1/messages")
    name, data = answer.strip().split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: "))["type"] == "error"


async def test_a_stalled_stream_stays_open_until_the_client_leaves() -> None:
    ended: list[type[BaseException] | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(receive())
        try:
            await stream(scope, receive, send)
        except BaseException as error:
            ended.append(type(error))
            raise
        finally:
            await watcher

    client = Client(app, Faults(stall_after_chunk=2))
    request = asyncio.create_task(client())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not request.done()
    assert client.got == [b"data: 1\n\n", b"data: \xe5\x8c\x97\n\n"]
    client.gone.set()
    await request
    # The application was stopped in its tracks, so that it aborts what it does.
    assert len(ended) == 1


async def test_bytes_go_out_one_by_one() -> None:
    client = Client(stream, Faults(byte_per_write=True))
    assert await client() == b"".join(CHUNKS)
    assert {len(piece) for piece in client.got} == {1}


async def test_only_json_for_clients_that_take_it_is_compressed() -> None:
    client = Client(whole, Faults(gzip=True))
    compressed = await client(accept_encoding="deflate, gzip")
    assert gzip.decompress(compressed) == JSON
    assert (client.headers["content-encoding"], client.headers["content-length"]) == ("gzip", str(len(compressed)))
    assert await client() == JSON
    streaming = Client(stream, Faults(gzip=True))
    assert await streaming(accept_encoding="gzip") == b"".join(CHUNKS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "faults"),
        ('{"statuz": 500}', "statuz"),
        ('{"status": 200}', "status"),
        ('{"rate": 1.5}', "rate"),
        ('{"stall_after_chunk": -1}', "stall_after_chunk"),
    ],
)
def test_faults_that_make_no_sense_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_faults(text)
