"""One fast emulated engine for all tests that do it no harm. Its cache is shared: every test brings its own prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from router.prompt import PromptEncoder
from tests.integration.emulated.process import MODEL, Server, running, tokenizer_folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--speed", "100", "--max-model-len", "2048", "--num-blocks", "2000", "--lora-modules", "ada") as one:
        yield one


@pytest.fixture(scope="session")
def encoder() -> PromptEncoder:
    return PromptEncoder.load(MODEL, tokenizer_folder())


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
