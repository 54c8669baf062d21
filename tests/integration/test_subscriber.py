"""The subscriber on real ZMQ sockets, against a publisher that loses, repeats, restarts and falls silent on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from replicas.events import BlockRemoved
from replicas.sequence import Lost, Restarted
from replicas.subscriber import Batch, Item, Subscriber, _receive
from tests.event_publisher import Publisher, batch

pytestmark = pytest.mark.integration

DEADLINE_S = 60


@pytest.fixture
def endpoints() -> tuple[str, str]:
    name = uuid4().hex
    return f"ipc://@whohas-test-{name}-events", f"ipc://@whohas-test-{name}-replay"


async def take(items: AsyncIterator[Item], count: int) -> list[Item]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(items) for _ in range(count)]


def seqs(items: list[Item]) -> list[int]:
    for item in items:
        assert isinstance(item, Batch), item
        assert item.events.events == [BlockRemoved([item.seq], "GPU")]
    return [item.seq for item in items if isinstance(item, Batch)]


@pytest.mark.parametrize("with_topic", [True, False])
async def test_lost_messages_are_replayed_in_order(endpoints: tuple[str, str], with_topic: bool) -> None:
    publisher = Publisher(*endpoints, with_topic=with_topic)
    async with Subscriber(*endpoints, replay_timeout_s=DEADLINE_S, probe_s=DEADLINE_S) as items:
        first = asyncio.create_task(take(items, 3))
        await publisher.subscribed()
        for seq in range(3):
            await publisher.publish(seq)
        assert seqs(await first) == [0, 1, 2]
        for seq in (3, 4):
            await publisher.publish(seq, lose=True)
        await publisher.publish(5)
        assert seqs(await take(items, 3)) == [3, 4, 5]
        assert publisher.questions == [0, 3]
    await publisher.stop()


async def test_a_late_joiner_gets_the_past_from_the_replay_socket(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    for seq in range(5):
        await publisher.publish(seq, lose=True)
    async with Subscriber(*endpoints) as items:
        assert seqs(await take(items, 5)) == [0, 1, 2, 3, 4]
    await publisher.stop()


async def test_a_full_buffer_is_replayed_without_a_hole(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    for seq in range(10_000):
        await publisher.publish(seq, lose=True)
    async with Subscriber(*endpoints, replay_timeout_s=10) as items:
        assert seqs(await take(items, 10_000)) == list(range(10_000))
    await publisher.stop()


async def test_a_lost_tail_is_found_in_a_quiet_time(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    async with Subscriber(*endpoints, probe_s=0.1) as items:
        await publisher.publish(0, lose=True)
        assert seqs(await take(items, 1)) == [0]
        await publisher.publish(1, lose=True)
        assert seqs(await take(items, 1)) == [1]
    await publisher.stop()


async def test_a_silent_replay_socket_is_rebuilt_and_asked_again(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints, silent=True)
    await publisher.publish(0, lose=True)
    async with Subscriber(*endpoints, replay_timeout_s=0.2) as items:
        first = asyncio.create_task(take(items, 1))
        async with asyncio.timeout(DEADLINE_S):
            while len(publisher.questions) < 2:
                await asyncio.sleep(0.01)
        publisher.silent = False
        assert seqs(await first) == [0]
    await publisher.stop()


async def test_a_replay_that_falls_silent_is_a_loss_and_the_stream_goes_on(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    async with Subscriber(*endpoints, replay_timeout_s=0.1, probe_s=0.1) as items:
        await publisher.publish(0, lose=True)
        assert seqs(await take(items, 1)) == [0]
        publisher.silent = True
        (lost,) = await take(items, 1)
        assert isinstance(lost, Lost)
        publisher.silent = False
        assert seqs(await take(items, 1)) == [0]
    await publisher.stop()


@pytest.mark.parametrize("with_replay", [True, False])
async def test_an_engine_that_restarts_in_place_is_noticed(endpoints: tuple[str, str], with_replay: bool) -> None:
    """Also where what it says first is lost, and its numbers look as if the old stream went on."""
    events, replay = endpoints[0], endpoints[1] if with_replay else None
    publisher = Publisher(events, replay)
    async with Subscriber(events, replay, probe_s=DEADLINE_S) as items:
        before = asyncio.create_task(take(items, 3))
        await publisher.subscribed()
        for seq in range(3):
            await publisher.publish(seq)
        assert seqs(await before) == [0, 1, 2]
        await publisher.stop()

        publisher = Publisher(events, replay)
        for seq in range(3):
            await publisher.publish(seq, lose=True, payload=batch(seq, engine=2))
        after = asyncio.create_task(take(items, 2))
        await publisher.subscribed()
        await publisher.publish(3, payload=batch(3, engine=2))
        change, item = await after
        assert isinstance(change, Restarted | Lost)
        assert isinstance(item, Batch)
        assert (item.events.ts, item.seq) == (2.0, 0 if with_replay else 3)
    await publisher.stop()


async def test_the_first_message_of_a_new_connection_never_overtakes_the_news_of_it(
    endpoints: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, subscriber = Publisher(endpoints[0]), Subscriber(endpoints[0], probe_s=DEADLINE_S)
    async with subscriber as items:
        before = asyncio.create_task(take(items, 1))
        await publisher.subscribed()
        await publisher.publish(7)
        assert seqs(await before) == [7]
        await publisher.stop()

        publisher = Publisher(endpoints[0])
        subscribed = asyncio.create_task(publisher.subscribed())
        assert subscriber._sub is not None
        while not subscribed.done():
            subscriber._sub.poll(0)  # it subscribes anew
            await asyncio.sleep(0.01)
        await publisher.publish(0, payload=batch(0, engine=2))
        assert subscriber._sub.poll(1000 * DEADLINE_S)
        looks = iter([True])  # both come right after the first look

        def ask_the_monitor(*args: Any) -> Any:
            if next(looks, False):
                raise zmq.Again
            return recv_monitor_message(*args)

        def ask_a_socket(socket: Any) -> list[bytes] | None:
            return None if next(looks, False) else _receive(socket)

        monkeypatch.setattr("replicas.subscriber.recv_monitor_message", ask_the_monitor)
        monkeypatch.setattr("replicas.subscriber._receive", ask_a_socket)
        await publisher.publish(1, payload=batch(1, engine=2))
        change, *rest = await take(items, 3)
        assert isinstance(change, Lost)
        assert [one.seq for one in rest if isinstance(one, Batch)] == [0, 1]
    await publisher.stop()


async def test_an_undecodable_message_is_a_loss_and_the_stream_goes_on(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    for seq, payload in enumerate((batch(0), b"\xc1", batch(2))):
        await publisher.publish(seq, lose=True, payload=payload)
    async with Subscriber(*endpoints) as items:
        first, lost, last = await take(items, 3)
        assert seqs([first, last]) == [0, 2]
        assert isinstance(lost, Lost)
    await publisher.stop()


async def test_malformed_messages_are_counted_and_skipped(endpoints: tuple[str, str]) -> None:
    publisher = Publisher(*endpoints)
    subscriber = Subscriber(*endpoints, probe_s=60)
    async with subscriber as items:
        waiting = asyncio.create_task(take(items, 1))
        async with asyncio.timeout(DEADLINE_S):
            while not subscriber.counters["malformed"]:
                await publisher._pub.send_multipart([b"kv-events", b"short", b""])
                await asyncio.sleep(0.05)
        await publisher.publish(0)
        assert seqs(await waiting) == [0]
    await publisher.stop()
