"""One seeded schedule of kills and stalls against the whole application: HAProxy, Ray Serve, engines, Valkey.

    engine killed, engine stalled, replica's actor killed, front process killed, Valkey stalled

Meanwhile chats stream in, each of a known length. Whatever falls, none of them may end with a byte too many or too few
and say that it is complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from tests.faults.invariants import Broken
from tests.integration.live import MODEL, Live, command_of, descendants

FAULTS: dict[str, tuple[str, bool]] = {
    # what its command line shows, and whether it is killed, or stopped for a while
    "engine killed": ("replicas.emulated", True),
    "engine stalled": ("replicas.emulated", False),
    "replica killed": ("ray::ServeReplica:whohas:Replica", True),
    "front killed": ("ray::ServeReplica:whohas:Ingress", True),
    "Valkey stalled": ("valkey-server", False),
}
_TOKENS = 12
_COMPLETE = "complete"


@dataclass
class Told:
    """What happened. `outcomes`: how requests ended; whatever is not complete said so."""

    faults: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


async def survive(live: Live, seed: int, seconds: float, bound_s: float = 180.0) -> Told:
    """Every fault once, in any order. Raises `Broken` where something does not hold `bound_s` after the last one."""
    dice, told = random.Random(seed), Told()
    names = dice.sample(sorted(FAULTS), len(FAULTS))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        clients = [asyncio.create_task(_client(session, live, number, told)) for number in range(6)]
        try:
            for name in names:
                await asyncio.sleep(seconds / len(names))
                told.faults.append(name)
                await _happen(live, name, dice)
        finally:
            for client in clients:
                client.cancel()
            ended = await asyncio.gather(*clients, return_exceptions=True)
        for end in ended:
            if not isinstance(end, asyncio.CancelledError):
                raise Broken(f"a client gave up: {end!r}") from end
        await _until_well(session, live, bound_s)
    return told


async def _happen(live: Live, name: str, dice: random.Random) -> None:
    sign, kill = FAULTS[name]
    victims = [pid for pid in descendants(live.process.pid) if sign in command_of(pid)]
    if not victims:
        raise Broken(f"no process to be {name}")
    victim = dice.choice(sorted(victims))
    with suppress(ProcessLookupError):
        if kill:
            os.kill(victim, signal.SIGKILL)
            return
        os.kill(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(dice.uniform(1, 3))
        finally:
            os.kill(victim, signal.SIGCONT)


async def _client(session: aiohttp.ClientSession, live: Live, number: int, told: Told) -> None:
    """One chat after the other, all with one of two system prompts."""
    system = f"You are client {number % 2}. " + "Be brief, be kind, be exact. " * 100
    turn = 0
    while True:
        turn += 1
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {turn} of {number}?"}]
        told.outcomes[await _chat(session, live, messages)] += 1
        await asyncio.sleep(0.05)


async def _chat(session: aiohttp.ClientSession, live: Live, messages: Sequence[dict[str, str]]) -> str:
    """How a streamed chat ended. Raises `Broken` where it lies about it."""
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": _TOKENS, "ignore_eos": True}
    pieces = 0
    try:
        async with session.post(f"{live.url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return f"status {response.status}"
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if text == "[DONE]":
                    if pieces != _TOKENS:
                        raise Broken(f"an answer of {pieces} tokens, not {_TOKENS}, ended as if it were complete")
                    return _COMPLETE
                event = json.loads(text) if text else {}
                if "error" in event:
                    return "error event"
                pieces += any(choice["delta"].get("content") for choice in event.get("choices", []))
                if pieces > _TOKENS:
                    raise Broken(f"more than {_TOKENS} tokens in an answer")
    except (aiohttp.ClientError, ConnectionError):
        return "connection lost"
    raise Broken("an answer ended without [DONE], an error event or a cut connection")


async def _until_well(session: aiohttp.ClientSession, live: Live, bound_s: float) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + bound_s
    while True:
        try:
            await _well(session, live)
            return
        except (Broken, aiohttp.ClientError, ConnectionError) as error:
            if clock() > end:
                raise Broken(f"not well {bound_s:g} s after the last fault: {error}") from error
        await asyncio.sleep(0.5)


async def _well(session: aiohttp.ClientSession, live: Live) -> None:
    """All replicas are back, nothing is booked for nobody, and what is promised is kept."""
    async with session.get(f"{live.url}/health") as response:
        if response.status != 200:  # the proxy's own, perhaps, which is no JSON
            raise Broken(f"health: status {response.status}")
        health = await response.json(content_type=None)
    if health.get("status") != "ok" or health["replicas"] != 4 or health["replicas_in_map"] != 4:
        raise Broken(f"health: {health}")
    async with session.get(f"{live.url}/metrics") as response:
        if response.status != 200:
            raise Broken(f"metrics: status {response.status}")
        lines = (await response.text()).splitlines()
    if busy := [line for line in lines if line.startswith("whohas_in_flight{") and not line.endswith(" 0.0")]:
        raise Broken(f"in flight while nobody asks: {busy}")
    chat = [{"role": "system", "content": "You were there. " * 200}, {"role": "user", "content": "And now?"}]
    ended = Counter([await _chat(session, live, chat) for _ in range(4)])
    if ended != {_COMPLETE: 4}:
        raise Broken(f"chats at rest ended as {dict(ended)}")
