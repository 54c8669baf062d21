"""The emulated engine's KV events as a collector meets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.integration.emulated.process import (
    Server,
    cached,
    complete,
    post,
    running,
)

pytestmark = pytest.mark.integration

END_SEQ = b"\xff" * 8


class Listener:
    """Collects event batches as a collector would."""

    def __init__(self, context: zmq.asyncio.Context, server: Server) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(server.events)
        self.replay = context.socket(zmq.DEALER)
        self.replay.rcvhwm = 20_000
        self.replay.connect(server.replay)

    async def batch(self) -> tuple[int, list[dict[str, Any]]]:
        topic, seq, payload = await self.socket.recv_multipart()
        assert topic == b"kv-events"
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(seq, "big"), events

    async def replayed(self, start: int) -> list[tuple[int, list[dict[str, Any]]]]:
        await self.replay.send_multipart([b"", start.to_bytes(8, "big")])
        batches: list[tuple[int, list[dict[str, Any]]]] = []
        while True:
            empty, topic, seq, payload = await self.replay.recv_multipart()
            assert empty == b""
            if seq == END_SEQ:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)[1]))


@contextmanager
def listening(server: Server) -> Iterator[Listener]:
    context = zmq.asyncio.Context()
    try:
        yield Listener(context, server)
    finally:
        context.destroy(linger=0)


async def test_events_and_their_replay_tell_what_the_cache_holds(http: aiohttp.ClientSession) -> None:
    flags = ("--speed", "100", "--num-blocks", "8", "--max-model-len", "128")
    with running(*flags) as server, listening(server) as listener:
        counts = Counter[int]()
        for start in range(12):
            await complete(http, server, [8000 + start] * 40, max_tokens=10, ignore_eos=True)
        batches = await listener.replayed(0)
        assert [seq for seq, _ in batches] == list(range(len(batches)))
        for _, events in batches:
            for event in events:
                change = 1 if event["type"] == "BlockStored" else -1
                counts.update(dict.fromkeys(event["block_hashes"], change))
        assert set(counts.values()) <= {0, 1}
        assert 0 < sum(counts.values()) <= 8
        assert batches[0][1][0]["token_ids"] == [8000] * 32
        assert (await listener.replayed(len(batches) - 1))[0] == batches[-1]
        assert await listener.replayed(len(batches)) == []


async def test_a_subscriber_gets_batches_in_order_and_a_clear_only_with_the_next_step(
    http: aiohttp.ClientSession,
) -> None:
    with running("--speed", "100") as server, listening(server) as listener:
        await complete(http, server, [8100] * 20, max_tokens=1)
        # The subscription may take a moment: what came before it is replayed.
        (missed,) = await listener.replayed(0)
        assert missed[0] == 0
        assert await post(http, server, "/reset_prefix_cache", {}) == {"success": True}
        assert await listener.replayed(1) == []
        assert cached(await complete(http, server, [8100] * 20, max_tokens=1)) == 0
        ((seq, events),) = await listener.replayed(1)
        assert (seq, [event["type"] for event in events]) == (1, ["AllBlocksCleared", "BlockStored"])
        for start in count(8101):
            await complete(http, server, [start] * 20, max_tokens=1)
            if await listener.socket.poll(100):  # the subscription has reached the publisher
                break
        received = [await listener.batch()]
        replayed = await listener.replayed(received[0][0])
        received += [await listener.batch() for _ in replayed[1:]]
        assert received == replayed


async def test_delayed_events_come_late_and_in_order(http: aiohttp.ClientSession) -> None:
    with running("--speed", "100", "--event-delay", "3") as server, listening(server) as listener:
        for start in range(5):
            await complete(http, server, [8200 + start] * 20, max_tokens=1)
        assert await listener.replayed(0) == []
        received = [await listener.batch() for _ in range(5)]
        assert [seq for seq, _ in received] == list(range(5))
        assert [events[0]["token_ids"][0] for _, events in received] == [8200 + start for start in range(5)]
