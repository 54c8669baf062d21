"""What goes wrong, drawn from a seed: faults, each with a time, a victim and a duration."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from serve.embedded_valkey import EmbeddedValkey
from tests.faults.system import Replica, System
from tests.redis_servers import Proxy


@dataclass(frozen=True, slots=True)
class Fault:
    """`victim` is a draw: which replica or router it means is known when it happens."""

    at_s: float
    name: str
    victim: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:5.2f} s  {self.name} ({self.victim % 10}) for {self.lasts_s:.2f} s"


def draw(seed: int, seconds: float, faults: int) -> list[Fault]:
    """Every kind about as often, in any order, also several at once."""
    dice = random.Random(seed)
    kinds = sorted(FAULTS)
    dice.shuffle(kinds)
    some = [
        Fault(dice.uniform(0, seconds), kinds[i % len(kinds)], dice.randrange(1 << 16), dice.uniform(0.1, seconds / 4))
        for i in range(faults)
    ]
    return sorted(some, key=lambda fault: fault.at_s)


def _replica(system: System, fault: Fault) -> Replica:
    return system.replicas[fault.victim % len(system.replicas)]


def _links(system: System) -> list[Proxy]:
    return [one.link for one in system.replicas] + [link for _, _, link in system.routers]


def _incarnation_ends(system: System, replica: Replica) -> None:
    writer = replica.collector._writer
    if replica.collector.lease is not None and (writer._dirty or replica.collector._task is None):
        system.ended.append((asyncio.get_running_loop().time(), replica.collector.lease.slot))


async def redis_stalls(system: System, fault: Fault) -> None:
    pid = system.valkey.pid
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            os.kill(pid, signal.SIGCONT)


async def redis_restarts_empty(system: System, fault: Fault) -> None:
    if system.valkey.pid is None:
        return
    port = system.valkey.port
    await asyncio.to_thread(os.kill, system.valkey.pid, signal.SIGCONT)
    system.valkey.stop()
    await asyncio.sleep(fault.lasts_s / 4)
    system.valkey = EmbeddedValkey(port)
    system.valkey.start()


async def redis_forgets(system: System, fault: Fault) -> None:
    """All keys, all functions, or every twentieth block."""
    async with Redis.from_url(system.valkey.url, socket_timeout=None) as client:
        if fault.victim % 3 == 0:
            await client.flushall()
        elif fault.victim % 3 == 1:
            await client.function_flush()
        else:
            keys = [key async for key in client.scan_iter(match=system.direct._prefix + b"b*", count=1000)]
            if gone := random.Random(fault.victim).sample(keys, len(keys) // 20):
                await client.delete(*gone)


async def a_link_is_silent(system: System, fault: Fault) -> None:
    links = _links(system)
    link = links[fault.victim % len(links)]
    link.hold(True)
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        link.hold(False)


async def links_break(system: System, fault: Fault) -> None:
    for link in _links(system)[fault.victim % 2 :: 2]:
        link.cut()


async def an_engine_restarts(system: System, fault: Fault) -> None:
    """In place: numbering begins again at 0, the cache is empty."""
    replica = _replica(system, fault)
    replica.stop_engine()
    _incarnation_ends(system, replica)
    replica.start_engine()


async def a_replica_is_killed(system: System, fault: Fault) -> None:
    """Actor, engine and collector at once; another one, with another name, takes its place."""
    replica = _replica(system, fault)
    system.replicas.remove(replica)
    replica.stop_engine()
    _incarnation_ends(system, replica)
    await replica.kill_collector()
    await replica.ownership.close()
    await asyncio.sleep(fault.lasts_s / 4)
    await system.add_replica()


async def a_collector_restarts(system: System, fault: Fault) -> None:
    replica = _replica(system, fault)
    _incarnation_ends(system, replica)
    await replica.kill_collector()
    await asyncio.sleep(fault.lasts_s / 4)
    if replica in system.replicas:
        await replica.start_collector()


async def events_are_lost(system: System, fault: Fault) -> None:
    """On the wire, or, one time of three, with more than the replay buffer holds."""
    publisher = _replica(system, fault).publisher
    publisher.forget = fault.victim % 3 == 0
    publisher.lose += 1 + fault.victim % 5


async def a_cache_is_cleared(system: System, fault: Fault) -> None:
    _replica(system, fault).engine.engines[0].scheduler.reset_prefix_cache(preempt_running=True)


async def a_router_crashes(system: System, fault: Fault) -> None:
    """Its bookings and claims must end with its lease; its clients get nothing more from it."""
    router, ownership, _ = system.routers.pop(fault.victim % len(system.routers))
    teller = router._member._teller
    await system.add_router()
    if teller is not None:
        teller.cancel()
        await asyncio.wait([teller], timeout=5)
    await ownership.close()


FAULTS: dict[str, Callable[[System, Fault], Awaitable[None]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        redis_stalls,
        redis_restarts_empty,
        redis_forgets,
        a_link_is_silent,
        links_break,
        an_engine_restarts,
        a_replica_is_killed,
        a_collector_restarts,
        events_are_lost,
        a_cache_is_cleared,
        a_router_crashes,
    )
}
