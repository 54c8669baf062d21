"""Two chats with one long system prompt: the second should land where the first did and find its prefix cached.

    python examples/chat.py [URL] [MODEL]

Needs aiohttp only. Without MODEL, the first one of /v1/models is asked.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import aiohttp

SYSTEM = "You are a support agent of Example Air. Be brief and polite, and never promise a refund. " * 40
QUESTIONS = ["My flight was cancelled. What now?", "How much luggage may I take along?"]


async def chat(session: aiohttp.ClientSession, model: str, question: str) -> tuple[dict[str, Any], Any]:
    """The answer's JSON and headers. Raises aiohttp's `ClientResponseError` for an error status."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": 32}
    async with session.post("/v1/chat/completions", json=body) as response:
        return await response.json(), response.headers


async def main(url: str = "http://127.0.0.1:8000", model: str = "") -> None:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout, raise_for_status=True) as session:
        if not model:
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
        for question in QUESTIONS:
            answer, headers = await chat(session, model, question)
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            print(f"{question}\n  {answer['choices'][0]['message']['content']!r}")
            print(f"  replica {headers.get('x-whohas-replica')}: {cached} of {usage['prompt_tokens']} tokens cached")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
