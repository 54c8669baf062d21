"""The measurements that a fit is made of, taken from a live engine that does nothing else meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.loadgen.client import Target
from serve.loadgen.fit import Decode, Prefill
from serve.loadgen.prompts import completion, token_ids
from serve.loadgen.types import Call, Outcome

_SEED = 4
_SETTLE_TOKENS = 4


class ProbeFailed(Exception):
    """The engine did not answer what was needed; the message says to what."""


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """`prompts`: prompt lengths, each measured `repeats` times; the lowest counts, since whatever disturbs adds time.

    `decodes`: (sequences, prompt tokens of each), each with answers of `output_tokens`.
    """

    prompts: Sequence[int] = (64, 512, 1024, 2000, 3000, 4000, 6000, 8000, 12000, 16000)
    decodes: Sequence[tuple[int, int]] = ((1, 64), (2, 64), (8, 64), (32, 64), (1, 8000), (8, 4000), (16, 4000))
    repeats: int = 3
    output_tokens: int = 100

    def within(self, max_model_len: int | None) -> ProbePlan:
        """The part of it that an engine with this context length can answer."""
        most = max_model_len or 2**31
        return ProbePlan(
            [one for one in self.prompts if one + 1 <= most],
            [one for one in self.decodes if one[1] + self.output_tokens <= most],
            self.repeats,
            self.output_tokens,
        )


async def probe(
    target: Target, model: str, plan: ProbePlan, report: Callable[[str], None] | None = None
) -> tuple[list[Prefill], list[Decode]]:
    """All the measurements of a plan, one after the other. Raises `ProbeFailed`."""
    run = time.time_ns()  # no prompt may be in the cache from an earlier run
    await _ask(target, completion(model, token_ids((_SEED, run, 0), 32), 2), "a first prompt")
    prefills = []
    for tokens in plan.prompts:
        _say(report, f"TTFT of {tokens} tokens")
        times = []
        for repeat in range(plan.repeats):
            prompt = token_ids((_SEED, run, 1, tokens, repeat), tokens)
            outcome = await _ask(target, completion(model, prompt, 1), f"a prompt of {tokens} tokens")
            times.append(outcome.ttft_s or 0.0)
        prefills.append(Prefill(tokens, min(times)))
    decodes = []
    for seqs, tokens in plan.decodes:
        _say(report, f"ITL of {seqs} sequences of {tokens} tokens")
        decodes.append(await _decode(target, model, seqs, tokens, plan.output_tokens, run))
    return prefills, decodes


async def _decode(target: Target, model: str, seqs: int, tokens: int, output_tokens: int, run: int) -> Decode:
    """All sequences share their prompt, so that few steps compute it; what counts is when all of them decode."""
    prompt = token_ids((_SEED, run, 2, seqs, tokens), tokens)
    what = f"{seqs} prompts of {tokens} tokens at once"
    await _ask(target, completion(model, prompt, 1), what)
    async with asyncio.TaskGroup() as group:
        call = completion(model, prompt, output_tokens)
        tasks = [group.create_task(_ask(target, call, what)) for _ in range(seqs)]
    outcomes = [task.result() for task in tasks]
    start = max(one.first_s or 0.0 for one in outcomes)
    end = min(one.last_s or 0.0 for one in outcomes)
    found = [step for one in outcomes if (step := _seconds_a_token(one, start, end)) is not None]
    if not found:
        raise ProbeFailed(f"{what}: they never decoded together; the engine may be too slow or too small for this")
    position = [tokens + output_tokens / 2] * seqs
    return Decode(seqs, sum(position), statistics.median(found))


def _seconds_a_token(outcome: Outcome, start: float, end: float) -> float | None:
    """Mean time from token to token within [start, end]; None when too few came."""
    times, at = [], outcome.first_s or 0.0
    for gap in (0.0, *outcome.gaps_s.tolist()):
        at += gap
        if start <= at <= end:
            times.append(at)
    if len(times) < _SETTLE_TOKENS or not outcome.output_tokens:
        return None
    # Several tokens can come at one moment: moments are turned into tokens by the answer's own ratio.
    moments = len(outcome.gaps_s)
    return (times[-1] - times[0]) / (len(times) - 1) * moments / (outcome.output_tokens - 1)


async def _ask(target: Target, call: Call, what: str) -> Outcome:
    outcome = await target.call(call)
    if outcome is None or not outcome.ok or outcome.ttft_s is None:
        raise ProbeFailed(f"{what}: {outcome.error if outcome else 'nothing was sent'}")
    return outcome


def _say(report: Callable[[str], None] | None, text: str) -> None:
    if report is not None:
        report(text)
