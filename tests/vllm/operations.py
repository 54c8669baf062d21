"""What the differential tests do to an engine, and how a seed makes thousands of such operations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

LORAS = {"ada": 1, "bob": 2}
"""Adapters by name, with the engine's number for each."""


@dataclass(frozen=True, slots=True)
class Setup:
    """`num_blocks` counts usable blocks."""

    block_size: int = 16
    num_blocks: int = 24
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True

    def fits(self, add: Add) -> bool:
        """Whether the pool can hold a request to its end. The last output token needs no slot."""
        return len(add.prompt) + len(add.output) - 1 <= self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Add:
    """A request with the token ids that the model will give it, at least one."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    arrival: float = 0.0
    priority: int = 0
    salt: str | None = None
    lora: str | None = None
    session_id: str | None = None
    reuse_cache: bool = True
    report_hits: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    name: str


@dataclass(frozen=True, slots=True)
class Reset:
    preempt_running: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """Starts a step. What comes before its `End` happens while the step runs."""


@dataclass(frozen=True, slots=True)
class End:
    pass


Operation = Add | Abort | Reset | Begin | End


def random_setup(rng: random.Random) -> Setup:
    """Small pools and budgets: most requests get chunked, many get preempted, nearly every block gets evicted."""
    block_size = rng.choice([1, 4, 8, 16, 16, 32])
    max_num_seqs = rng.choice([1, 2, 4, 8, 32])
    budget = rng.choice([block_size, block_size * 3 + 1, block_size * 8]) + rng.randrange(8)
    return Setup(
        block_size=block_size,
        num_blocks=rng.choice([6, 12, 24, 60]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),  # vLLM refuses fewer
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.9,
    )


class Traffic:
    """An endless source of operations: conversations that go on, branch and come twice at once."""

    MAX_UNFINISHED = 16

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._setup = setup
        self._rng = rng
        self._count = 0
        self._clock = 0.0
        self._past: list[Add] = []
        self._in_step = False
        self._busy = 0.5

    def next(self, unfinished: list[str]) -> Operation:
        """`unfinished` names the requests that neither ended nor were aborted."""
        rng = self._rng
        if rng.random() < 0.02:
            self._busy = rng.choice([0.1, 0.3, 0.6])  # now a rush, now time to drain
        if self._in_step and rng.random() < 0.85:
            self._in_step = False
            return End()
        choice = rng.random()
        if choice < 0.015 and unfinished:
            return Abort(rng.choice(unfinished))
        if choice < 0.02:
            return Reset(preempt_running=rng.random() < 0.3)
        if self._in_step and choice < 0.5:
            self._in_step = False
            return End()
        if len(unfinished) < self.MAX_UNFINISHED and (self._in_step or rng.random() < self._busy):
            return self._add()
        if self._in_step:
            self._in_step = False
            return End()
        self._in_step = True
        return Begin()

    def _add(self) -> Add:
        rng = self._rng
        self._count += 1
        self._clock += rng.choice([0.0, 1.0, 1.0])
        twin = self._past and rng.random() < 0.2
        if twin:
            model = self._past[-1 - rng.randrange(min(4, len(self._past)))]
            prompt, output, salt, lora = model.prompt, model.output, model.salt, model.lora
        else:
            prompt, output = self._texts()
            # A salt may well read like the name of an adapter.
            salt = rng.choice([None, None, None, "salt", "ada"])
            lora = rng.choice([None, None, None, *LORAS])
        add = Add(
            f"r{self._count}",
            prompt,
            output,
            arrival=self._clock,
            priority=rng.choice([0, 0, 1, 2]) if self._setup.policy == "priority" else 0,
            salt=salt,
            lora=lora,
            session_id=rng.choice([None, None, "s1"]),
            reuse_cache=rng.random() < 0.95,
            report_hits=rng.random() < 0.05,
        )
        self._past = [*self._past[-19:], add]
        return add

    def _texts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A prompt and an output that fit into the pool together."""
        rng, size = self._rng, self._setup.block_size
        room = self._setup.num_blocks * size + 1
        longest_prompt = int(rng.choice([0.25, 0.5, 1.0]) * (room - 1))
        base: tuple[int, ...] = ()
        if self._past and rng.random() < 0.7:
            before = rng.choice(self._past)
            base = before.prompt + before.output
            if rng.random() < 0.5:
                base = base[: rng.randrange(len(base) + 1)]
        tail = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 3 * size + 2)))
        prompt = (base + tail)[:longest_prompt]
        length = min(rng.choice([1, size, rng.randrange(1, 8 * size + 1)]), room - len(prompt))
        return prompt, tuple(rng.randrange(3) for _ in range(length))
