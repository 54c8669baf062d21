"""Traffic for comparing policies: a trace thinned so that whole conversations stay, and users who chat in turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from tests.sim import traces
from tests.sim.simulated_fleet import Answered, Call, SimulatedFleet

_SYSTEM_TOKENS = 4096
_THINK_S = 10.0


def thinned_mooncake(keep_one_in: int = 8, count: int = 1000) -> list[Call]:
    """The first `count` requests of one conversation in `keep_one_in`. The second block tells conversations apart: the
    first is a system prompt that many share."""

    def kept(hash_ids: list[int]) -> bool:
        return xxh64_intdigest(str(hash_ids[min(1, len(hash_ids) - 1)]).encode(), 77) % keep_one_in == 0

    calls = traces.mooncake(60.0, keep=kept)[:count]
    return [Call(call.at - calls[0].at, call.token_ids, call.output, call.num_output) for call in calls]


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation; a turn is (tokens asked, tokens answered, seconds of thought before it)."""

    number: int
    system: int
    turns: list[tuple[int, int, float]]


def chats(count: int, systems: int = 20, seed: int = 1) -> list[Chat]:
    """About five turns each, with one of some system prompts, a few of them more popular than the rest."""
    dice = random.Random(seed)
    weights = [1 / (rank + 1) ** 0.8 for rank in range(systems)]
    found = []
    for number in range(count):
        system = dice.choices(range(systems), weights)[0]
        turns = [
            (dice.randint(60, 300), dice.randint(80, 320), dice.expovariate(1 / _THINK_S))
            for _ in range(min(15, int(dice.expovariate(0.2)) + 1))
        ]
        found.append(Chat(number, system, turns))
    return found


async def chat_in_turns(fleet: SimulatedFleet, users: int, some: list[Chat]) -> list[Answered]:
    """So many users take one chat after the other, each turn after the answer to the one before."""
    left, answers = iter(some), list[Answered]()
    await asyncio.gather(*(_user(fleet, left, answers) for _ in range(users)))
    return answers


async def _user(fleet: SimulatedFleet, left: Iterator[Chat], answers: list[Answered]) -> None:
    for chat in left:
        text = _tokens(f"system {chat.system}", _SYSTEM_TOKENS)
        for turn, (asked, answered, thought_s) in enumerate(chat.turns):
            await asyncio.sleep(thought_s)
            text = text + _tokens(f"{chat.number}.{turn} asked", asked)
            output = _tokens(f"{chat.number}.{turn} answered", answered)
            answers.append(await fleet.ask(Call(0.0, text, output, answered)))
            text = text + output


def _tokens(name: str, count: int) -> list[int]:
    return random.Random(name).choices(range(1000, 150_000), k=count)
