"""The front's one event loop belongs to everybody: nothing may hold it up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from router.types import HashedPrompt
from tests.wire.front_bench import chat, encoder, scripted_front, until
from tests.wire.scripted_engine import answer

SMALL = 10_000
LONG = chat("word " * 128_000)


class StuckOnLongPrompts:
    """Tokenises short prompts as ever, and long ones not before it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.stuck = 0

    @property
    def off_loop_bytes(self) -> int:
        return min(SMALL, encoder().off_loop_bytes)

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        if len(str(body)) > SMALL:
            self.stuck += 1
            assert self.go.wait(300)
        return encoder().hashed(path, body, block_size)


async def test_h9_long_prompts_and_l4_a_tokenizer_that_blocks_hold_up_nobody_else() -> None:
    """Eight prompts of 128,000 words wait in the tokenizer, for as long as the small ones need."""
    prompts = StuckOnLongPrompts()
    async with scripted_front(answer, answer, prompts=prompts) as (bench, _):
        long = [asyncio.create_task(bench.post(body=LONG)) for _ in range(8)]
        try:
            await until(lambda: prompts.stuck > 0 and bench.in_flight == 0)
            for _ in range(50):
                assert (await bench.post())[0] == 200
                async with bench.http.get(bench.url + "/health") as response:
                    assert response.status == 200
            assert not any(one.done() for one in long)
        finally:
            prompts.go.set()
        assert [status for status, _, _ in await asyncio.gather(*long)] == [200] * 8
        await bench.until_free()


def test_h9_a_prompt_of_128000_words_is_too_long_for_the_loop() -> None:
    assert len(str(LONG)) > encoder().off_loop_bytes
