"""Bodies of many kinds: recorded sessions with tools, two-turn questions, clients' own, and generated ones.

    python -m tests.vllm.many_bodies --bodies 1000 --chats 2000

compares at length what the tests compare in part: the router's ids with those of vLLM's renderer, and hashes with and
without memory, on each of the three tokenizers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain as chained
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.errors import UnknownPrompt
from router.hashing import HashChain, chain
from router.prompt import CHAT_PATH, COMPLETIONS_PATH, PromptEncoder
from router.template_proof import bodies
from serve.loadgen.files import session_bodies
from tests.vllm.tokenizer_files import MAKERS

if TYPE_CHECKING:
    from tests.vllm.vllm_renderer import VllmRenderer

DATA = Path(__file__).parents[2].parent / "shared" / "data"
_FIXTURE = Path(__file__).parents[1] / "fixtures" / "request_bodies.jsonl"
Body = dict[str, Any]


def recorded() -> Iterator[tuple[str, str, Body]]:
    """Name, path and body of what clients really send; repetitions are bounded."""
    for line in _FIXTURE.read_text("utf-8").splitlines():
        record = json.loads(line)
        path, body = record["path"].partition("?")[0], record["body"]
        for message in body.get("messages", []):
            if "content_repeat" in message:
                text, times = message.pop("content_repeat")
                message["content"] = text * min(times, 2_000)
        if path in (CHAT_PATH, COMPLETIONS_PATH):
            yield record["name"], path, body


def agents(count: int) -> list[Body]:
    """So many requests of the recorded agent sessions, evenly spread; none where the file isn't there."""
    file = DATA / "tau_airline_sessions.jsonl.gz"
    if not file.exists():
        return []
    every = list(chained.from_iterable(session_bodies(file)))
    return every[:: max(1, len(every) // count)][:count]


def questions() -> Iterator[Body]:
    """First turns, and both turns with an answer between."""
    file = DATA / "mt_bench_question.jsonl.gz"
    if not file.exists():
        return
    for line in gzip.decompress(file.read_bytes()).splitlines():
        first, second = json.loads(line)["turns"][:2]
        turns = [{"role": "user", "content": first}, {"role": "assistant", "content": f"In short: {first.upper()}"}]
        yield {"messages": turns[:1]}
        yield {"messages": [*turns, {"role": "user", "content": second}]}


def generated(encoder: PromptEncoder, seed: int, count: int) -> Iterator[Body]:
    source = encoder.files.templates["default"]
    tokens = [token.content for token in encoder.files.tokenizer.get_added_tokens_decoder().values()][:40]
    yield from bodies(source, count=count, seed=seed, words=tokens)


def outcome(encoder: PromptEncoder, renderer: VllmRenderer, path: str, body: Body) -> str:
    """What came of a body: equal, refused (by vLLM) or left to the engine (by the router).

    AssertionError where both answer and differ.
    """
    from tests.vllm.vllm_renderer import Refused

    sent = json.dumps(body)
    try:
        expected = renderer.token_ids(path, json.loads(sent))
    except Refused as error:
        return f"refused: {error}"
    try:
        known = encoder.token_ids(path, json.loads(sent))
    except UnknownPrompt as error:
        return f"left to the engine: {error}"
    texts = f"{encoder.decode(known[0])!r} in the router, {encoder.decode(expected[0])!r} in vLLM"
    assert known == expected, f"{texts} for {sent}"
    return "equal"


def compare(encoder: PromptEncoder, renderer: VllmRenderer, seed: int, count: int) -> Counter[str]:
    """Until so many bodies had equal ids: at most half of them recorded ones, the rest generated.

    How often what happened; AssertionError at the first difference.
    """
    own = [(path, body) for _, path, body in recorded()]
    real = [*own, *((CHAT_PATH, body) for body in chained(islice(questions(), count // 6), agents(count // 4)))]
    counts: Counter[str] = Counter()
    for path, body in chained(real[: count // 2], ((CHAT_PATH, body) for body in generated(encoder, seed, 10 * count))):
        found = outcome(encoder, renderer, path, body)
        counts[found if found.startswith("left") else found.partition(":")[0]] += 1
        if counts["equal"] == count:
            break
    return counts


def same_hashes(encoder: PromptEncoder, body: Body, block_size: int) -> bool:
    """Whether hashing with memory gives what hashing the whole prompt gives."""

    def hashed(quick: bool) -> Any:
        try:
            if quick:
                known = encoder.hashed(CHAT_PATH, body, block_size)
                return known.num_tokens, HashChain(b"".join(known.hashes))
            prompt = encoder.prompt(CHAT_PATH, body)
        except UnknownPrompt as error:
            return error.reason
        return prompt.num_tokens, HashChain(b"".join(chain(prompt.root, prompt.token_ids, block_size)))

    return bool(hashed(True) == hashed(False))


def growing(encoder: PromptEncoder, seed: int, count: int) -> Iterator[Body]:
    """Adversarial chats as they grow, branch, and come again."""
    draw = random.Random(seed)
    earlier: list[Body] = []
    for body in generated(encoder, seed, count):
        if earlier and draw.random() < 0.6:
            before = draw.choice(earlier)
            cut = draw.randint(1, len(before["messages"]))
            body = {**before, "messages": [*before["messages"][:cut], *body["messages"]][:40]}
        earlier = [*earlier[-20:], body]
        yield body


def main() -> None:
    from tests.vllm.vllm_renderer import VllmRenderer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=1000, help="for each template, against vLLM's renderer")
    parser.add_argument("--chats", type=int, default=2000, help="for each tokenizer, with and without memory")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    for name, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            encoder = PromptEncoder.load("demo-model", str(make(Path(folder))), ["adapter-a"], fast=True)
            print(name, dict(encoder.settle(120)), flush=True)
            renderer, began = VllmRenderer(Path(folder)), time.monotonic()
            counts = compare(encoder, renderer, given.seed, given.bodies)
            print(f"  against vLLM, {time.monotonic() - began:.0f} s:", dict(counts), flush=True)
            renderer.close()
            began, hits = time.monotonic(), 0
            for number, body in enumerate(growing(encoder, given.seed, given.chats)):
                assert same_hashes(encoder, body, (16, 32, 1)[number % 3]), json.dumps(body)
                hits += 1
            print(f"  memory against none, {time.monotonic() - began:.0f} s: no difference in {hits} chats", flush=True)


if __name__ == "__main__":
    main()
