"""A map that is closed while somebody asks it, or after: no connection is left behind for Python to complain of."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.errors import OwnershipUnavailable
from router.ownership import Snapshot
from router.ownership.redis import RedisOwnershipMap
from tests.redis_servers import proxy

pytestmark = pytest.mark.integration


async def test_who_asks_a_closed_map_is_refused(valkey_url: str, fleet: str) -> None:
    ownership = RedisOwnershipMap(valkey_url, fleet, timeout_s=30.0, look_up_timeout_s=30.0)
    await ownership.connect()
    await ownership.close()
    with pytest.raises(OwnershipUnavailable, match="closed"):
        await ownership.look_up([])
    with pytest.raises(OwnershipUnavailable, match="closed"):
        await ownership.connect()
    with pytest.raises(OwnershipUnavailable, match="closed"):
        await anext(ownership.holdings())
    del ownership
    gc.collect()


async def test_what_is_asked_while_it_closes_leaves_no_connection(valkey_url: str, fleet: str) -> None:
    port = int(valkey_url.rpartition(":")[2].partition("/")[0])
    async with proxy(port) as link:
        ownership = RedisOwnershipMap(f"redis://127.0.0.1:{link.port}/0", fleet, timeout_s=30.0, look_up_timeout_s=30.0)
        await ownership.connect()
        link.hold(True)
        asked = [asyncio.create_task(ownership.look_up([])) for _ in range(3)]
        async with asyncio.timeout(60):
            while link.held < 3:
                await asyncio.sleep(0.01)
        await ownership.close()
        link.hold(False)
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, Snapshot | OwnershipUnavailable)
        del ownership, asked
        gc.collect()
