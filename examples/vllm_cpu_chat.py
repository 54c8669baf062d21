"""A chat with a real model on a machine without a GPU: what a warm prefix cache saves.

    make install-vllm
    .venv/bin/python -m tests.vllm.models models                 # SmolLM2-135M, from an installed package
    .venv/bin/whohas up --engine vllm --model models/smollm2-135m --replicas 2
    .venv/bin/python examples/vllm_cpu_chat.py [URL]

Prints the time to the first token: of a system prompt that no replica has seen, then of further turns. Nothing but the
standard library is needed here.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

RULES = "You work for a small public library and answer in one sentence. "
RULES += " ".join(f"Shelf {i} has books about {topic}." for i in range(30) for topic in ("birds", "ships", "bread"))
QUESTIONS = ["Where do I find a book about ships?", "And what is the capital of France?", "Thank you. Who are you?"]


@dataclass
class Turn:
    text: str = ""
    ttft_s: float = 0.0
    replica: str = ""
    predicted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def ask(url: str, body: dict[str, Any]) -> Turn:
    """One streamed answer. Raises `urllib.error.HTTPError` for an error status."""
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(stream).encode(), {"content-type": "application/json"}
    )
    turn = Turn()
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        turn.replica = response.headers["x-whohas-replica"]
        turn.predicted = int(response.headers["x-whohas-predicted-cached-tokens"])
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if usage := chunk.get("usage"):
                turn.prompt_tokens = usage["prompt_tokens"]
                turn.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    turn.ttft_s = turn.ttft_s or time.perf_counter() - began
                    turn.text += piece
    return turn


def main(url: str = "http://127.0.0.1:8000") -> None:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    unseen = f"Today's password is {time.time_ns()}. "  # so that the first turn is cold however often this is run
    messages = [{"role": "system", "content": unseen + RULES}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        turn = ask(url, {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0})
        messages.append({"role": "assistant", "content": turn.text})
        print(f"{question}\n  {turn.text.strip()!r}")
        print(
            f"  first token after {turn.ttft_s:.2f} s: {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens were "
            f"cached at {turn.replica} (predicted: {turn.predicted})"
        )


if __name__ == "__main__":
    main(*sys.argv[1:2])
