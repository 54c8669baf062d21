"""What passes through the front, byte for byte, and what must not."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
from urllib.parse import urlsplit

import pytest

from tests.wire.front_bench import CHAT, PATIENCE_S, chat, scripted_front
from tests.wire.scripted_engine import DONE, Exchange, answer, event, healthy_but, usage

STREAM = chat(stream=True)
CJK = event("用中文介绍北京🙂") + event("é\u0301 \U0001d54f") + usage(16) + DONE


async def test_h6_characters_cut_anywhere_arrive_byte_for_byte() -> None:
    async def byte_by_byte(exchange: Exchange) -> None:
        await exchange.stream()
        for i in range(len(CJK)):
            await exchange.chunk(CJK[i : i + 1])
            await asyncio.sleep(0)
        await exchange.end()

    async with scripted_front(healthy_but(byte_by_byte)) as (bench, _):
        _, body, _ = await bench.post(body=STREAM)
        assert body == CJK
        assert b"\xef\xbf\xbd" not in body


async def test_h6_the_framing_may_be_cut_anywhere_too() -> None:
    """Pieces of 1 to 7 bytes of the answer as it is on the wire, chunk sizes and headers included."""
    draw = random.Random(3)
    frames = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in (CJK[:50], CJK[50:51], CJK[51:]))
    wire = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + frames
    wire += b"0\r\nX-Trailer: 1\r\n\r\n"

    async def in_pieces(exchange: Exchange) -> None:
        at = 0
        while at < len(wire):
            size = draw.randint(1, 7)
            await exchange.write(wire[at : at + size])
            at += size
            await asyncio.sleep(0)
        exchange.reusable = True

    async with scripted_front(healthy_but(in_pieces)) as (bench, (engine,)):
        for _ in range(3):
            status, body, headers = await bench.post(body=STREAM)
            assert (status, body) == (200, CJK)
            assert "x-trailer" not in headers
        assert engine.connections == 1


async def test_chunks_go_on_as_they_come() -> None:
    """The engine sends its second event only when the client has the first one."""
    seen = asyncio.Event()

    async def in_step(exchange: Exchange) -> None:
        await exchange.stream(event("one"))
        await seen.wait()
        await exchange.chunk(event("two"))
        await exchange.end()

    async with (
        scripted_front(healthy_but(in_step)) as (bench, _),
        bench.http.post(bench.url + CHAT, json=STREAM) as response,
    ):
        assert await response.content.readuntil(b"\n\n") == event("one")
        seen.set()
        assert await response.content.read() == event("two")


async def test_a_client_that_does_not_read_holds_up_its_engine_and_loses_nothing() -> None:
    """Back-pressure: of 64 MiB the engine gets rid of a few, until the client reads."""
    size, num = 65536, 1024
    written = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal written
        await exchange.stream()
        for i in range(num):
            await exchange.chunk(b"%08d" % i * (size // 8))
            written = i + 1
        await exchange.end()

    async with scripted_front(healthy_but(flood)) as (bench, _):
        async with bench.http.post(bench.url + CHAT, json=STREAM) as response:
            before = -1
            while written != before:  # until nothing moves any more
                before = written
                await asyncio.sleep(0.5)
            assert written < num // 2
            assert await response.read() == b"".join(b"%08d" % i * (size // 8) for i in range(num))
            assert written == num
        await bench.until_free()


async def test_h7_usage_in_the_last_event_is_relayed_and_read_once() -> None:
    async def with_usage(exchange: Exchange) -> None:
        text = event('"cached_tokens": 99 {"cached_tokens": 98}')
        await exchange.stream(event("one"), text, usage(16), DONE)
        await exchange.end()

    async with scripted_front(healthy_but(with_usage)) as (bench, _):
        body = chat(stream=True, stream_options={"include_usage": True})
        _, raw, _ = await bench.post(body=body)
        last = json.loads(raw.split(b"\n\n")[-3].removeprefix(b"data: "))
        assert last["choices"] == []
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        assert bench.metrics.reported._value.get() == 16


async def test_h7_an_answer_without_usage_is_no_report() -> None:
    async def without(exchange: Exchange) -> None:
        await exchange.stream(event("one"), event("", choices=[]), DONE)
        await exchange.end()

    async with scripted_front(healthy_but(without)) as (bench, _):
        assert (await bench.post(body=STREAM))[0] == 200
        assert bench.metrics.reported._value.get() == 0


async def test_h13_a_compressed_answer_keeps_its_header_and_its_bytes() -> None:
    packed = gzip.compress(b'{"a": "b"}')

    async def compressed(exchange: Exchange) -> None:
        assert exchange.headers["accept-encoding"] == "gzip, br"
        await exchange.whole(packed, Content_Encoding="gzip", Vary="accept-encoding")

    async with scripted_front(healthy_but(compressed)) as (bench, _):
        _, body, headers = await bench.post(headers={"accept-encoding": "gzip, br"})
        assert body == packed
        assert headers["content-encoding"] == "gzip"
        assert headers["vary"] == "accept-encoding"
        assert headers["content-length"] == str(len(packed))


async def test_h13_a_coding_that_the_body_belies_is_not_passed_on() -> None:
    async def stale(exchange: Exchange) -> None:
        await exchange.whole(b'{"a": "b"}', Content_Encoding="gzip")

    async with scripted_front(healthy_but(stale)) as (bench, _):
        _, body, headers = await bench.post()
        assert body == b'{"a": "b"}'
        assert "content-encoding" not in headers


async def test_h13_hop_by_hop_headers_stay_on_their_hop() -> None:
    async def hops(exchange: Exchange) -> None:
        await exchange.whole(
            b"{}",
            Connection="keep-alive, X-Private",
            Keep_Alive="timeout=5",
            X_Private="1",
            Proxy_Authenticate="x",
            X_Public="2",
            Server="engine",
            X_Request_Id="engine's own",
        )

    sent = {
        "Connection": "keep-alive, x-mine",
        "X-Mine": "1",
        "Keep-Alive": "9",
        "TE": "trailers",
        "Upgrade": "h2c",
        "Proxy-Connection": "x",
        "X-Unknown": "kept",
        "Authorization": "Bearer x",
    }
    async with scripted_front(healthy_but(hops)) as (bench, (engine,)):
        _, _, headers = await bench.post(headers=sent)
        (exchange,) = engine.generations
        assert exchange.headers["x-unknown"] == "kept"
        assert exchange.headers["authorization"] == "Bearer x"
        assert not exchange.headers.keys() & {"connection", "keep-alive", "te", "upgrade", "proxy-connection", "x-mine"}
        assert exchange.headers["host"] == urlsplit(engine.url).netloc
        assert headers["x-public"] == "2"
        assert not headers.keys() & {"x-private", "keep-alive", "proxy-authenticate"}
        assert headers.getall("server") == ["uvicorn"]
        assert len(headers.getall("x-request-id")) == 1


async def test_ids_of_request_and_trace_are_passed_on_or_made() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with scripted_front(answer) as (bench, (engine,)):
        _, _, headers = await bench.post(headers={"x-request-id": "bench-0", "traceparent": trace})
        assert headers["x-request-id"] == "bench-0"
        assert engine.generations[0].headers["x-request-id"] == "bench-0"
        assert engine.generations[0].headers["traceparent"] == trace
        _, _, headers = await bench.post()
        assert headers["x-request-id"] == engine.generations[1].headers["x-request-id"]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", engine.generations[1].headers["traceparent"])


async def test_bodies_and_targets_reach_the_engine_as_they_were_written() -> None:
    odd = b'\xef\xbb\xbf {"messages" : [ {"role":"user","content":"\\u00e9"} ],\n "z": 1.0e2, "model": "demo-model"}  '
    async with scripted_front(answer) as (bench, (engine,)):
        target = f"{CHAT}?beta=true&x=%2F%20+"
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(bench.url).port)
        writer.write(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (target.encode(), len(odd), odd))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        (exchange,) = engine.generations
        assert (exchange.target, exchange.body) == (target, odd)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT", "HEAD"])
async def test_every_path_and_method_of_the_engine_passes(method: str) -> None:
    async def tell(exchange: Exchange) -> None:
        await exchange.whole(b"" if exchange.method == "HEAD" else exchange.target.encode(), X_Method=exchange.method)

    async with scripted_front(tell) as (bench, (engine,)):
        for path in ("/v1/audio/transcriptions", "/v1/models/a%2Fb", "/v1/responses/resp_1/cancel", "/tokenize"):
            async with bench.http.request(method, bench.url + path.replace("%", "%25")) as response:
                assert response.status == 200
                assert response.headers["x-method"] == method
        assert len(engine.exchanges) == 4
        assert bench.nothing_is_booked()


async def test_interim_answers_are_skipped_and_empty_ones_pass() -> None:
    async def early(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n")
        exchange.reusable = True

    async with scripted_front(early) as (bench, (engine,)):
        for _ in range(2):
            status, body, headers = await bench.post("/v1/files")
            assert (status, body, headers["x-a"]) == (204, b"", "b")
            assert "link" not in headers
        assert engine.connections == 1


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    async def old(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")

    async with scripted_front(healthy_but(old)) as (bench, (engine,)):
        for _ in range(2):
            status, body, _ = await bench.post()
            assert (status, body) == (200, b"all of it")
        assert engine.connections == 2


async def test_what_is_no_http_is_a_502() -> None:
    async def nonsense(exchange: Exchange) -> None:
        await exchange.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async with scripted_front(healthy_but(nonsense)) as (bench, _):
        status, body, _ = await bench.post()
        assert status == 502
        assert "OpenSSH" not in body.decode()


async def test_a_kept_connection_that_the_engine_closed_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.upstream._STALE_S", PATIENCE_S)  # it breaks at once, but this process may be late to see
    async with scripted_front(answer) as (bench, (engine,)):
        for i in range(3):
            assert (await bench.post())[0] == 200
            assert engine.connections == i + 1
            for writer in list(engine._writers):
                writer.close()
            await asyncio.sleep(0)
        assert bench.metrics.retries._value.get() == 0
        assert len(engine.generations) == 3


async def test_connections_are_used_again() -> None:
    async with scripted_front(answer) as (bench, (engine,)):
        for _ in range(5):
            assert (await bench.post(body=STREAM))[0] == 200
        assert engine.connections == 1
        await asyncio.gather(*(bench.post(body=STREAM) for _ in range(10)))
        assert engine.connections <= 11
        assert bench.upstream.num_open <= 11
