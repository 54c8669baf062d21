"""Every way of naming a Redis, without one."""

from __future__ import annotations

import re

import pytest
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from router.errors import OwnershipUnavailable
from router.ownership.client import SCHEMES, make_client, make_raw_client, safe_url


async def test_a_sentinel_url_names_sentinels_service_and_both_passwords() -> None:
    client = make_raw_client("redis+sentinel://me:pw@h1:26380,h2/main/3?sentinel_password=other", 1.0)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "main"
    assert (pool.connection_kwargs["username"], pool.connection_kwargs["password"]) == ("me", "pw")
    assert pool.connection_kwargs["db"] == 3
    asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"], one["password"]) for one in asked] == [
        ("h1", 26380, "other"),
        ("h2", 26379, "other"),
    ]
    await client.aclose()


async def test_a_cluster_url_names_some_nodes_and_tls() -> None:
    client = make_raw_client("rediss+cluster://:p%40ss@h1:7000,h2?ssl_cert_reqs=none", 1.0)
    assert isinstance(client, RedisCluster)
    nodes = client.nodes_manager.startup_nodes.values()
    assert sorted((node.host, node.port) for node in nodes) == [("h1", 7000), ("h2", 6379)]
    assert client.connection_kwargs["password"] == "p@ss"
    assert client.connection_kwargs["ssl_cert_reqs"] == "none"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis+sentinel://h1:26379", "which service"),
        ("redis+cluster://", "a host is missing"),
        ("redis+nothing://h1", "no Redis URL"),
        ("http://h1", "one of the following schemes"),
    ],
)
def test_a_url_that_can_t_be_read_is_said_without_its_password(url: str, told: str) -> None:
    with pytest.raises(OwnershipUnavailable, match=told):
        make_client(url, 1.0)
    with pytest.raises(OwnershipUnavailable) as caught:
        make_client("redis+sentinel://me:secret@h1:26379", 1.0)
    assert "secret" not in str(caught.value)


def test_logs_see_neither_password_nor_query() -> None:
    assert safe_url("redis+sentinel://me:pw@h1,h2/main?sentinel_password=x") == "redis+sentinel://h1,h2/main"


@pytest.mark.parametrize("scheme", ["redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster"])
def test_all_schemes_are_taken_in_a_configuration(scheme: str) -> None:
    assert re.match(SCHEMES, f"{scheme}://h")
    assert not re.match(SCHEMES, f"{scheme}+x://h")
