"""Token ids that the router has anyway, sent to an engine along with a chat."""

from __future__ import annotations

import json

from router.handover import with_token_ids
from router.prompt import PromptEncoder
from tests.wire.front_bench import CHAT, MODEL, scripted_front
from tests.wire.scripted_engine import DONE, Exchange, event, healthy_but

RAW = (
    b'{ "model": "demo-model", "messages": [{"role": "user", "content": "caf\xc3\xa9 \\u00e9"}], "temperature": 1.0 }\n'
)


async def test_an_engine_gets_the_clients_bytes_and_the_ids_where_that_is_set_and_the_bytes_alone_otherwise() -> None:
    for keep_ids in (True, False):
        encoder = PromptEncoder.load(MODEL, "builtin", keep_ids=keep_ids)
        seen: list[bytes] = []

        async def remember(exchange: Exchange, seen: list[bytes] = seen) -> None:
            seen.append(exchange.body)
            await exchange.stream(event("one"), DONE)
            await exchange.end()

        async with (
            scripted_front(healthy_but(remember), prompts=encoder) as (bench, _),
            bench.http.post(bench.url + CHAT, data=RAW) as response,
        ):
            assert response.status == 200
            await response.read()
        ids = encoder.prompt(CHAT, json.loads(RAW)).token_ids
        assert seen == [with_token_ids(RAW, ids) if keep_ids else RAW]
