"""Clients for the ways in which Redis is run, and what its errors mean for the user.

    redis://[user:password@]host:port/db            one server; rediss:// with TLS, unix:///path for a socket
    redis+sentinel://host:port,host:port/service    whichever server Sentinel says is the primary
    redis+cluster://host:port,host:port             a cluster; some of its nodes are enough to find the others

`rediss+sentinel`, `rediss+cluster` are the same with TLS. User and password are the servers' own; the Sentinels' are
the query's `sentinel_username` and `sentinel_password`. Further query fields go to redis-py (`ssl_ca_certs=...`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis import asyncio as redis_asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from router.errors import OwnershipUnavailable

SCHEMES = r"^(rediss?(\+(sentinel|cluster))?|unix)://"
"""What a URL must begin with."""
_MAX_CONNECTIONS = 2000
_SCAN_COUNT = 2000
_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}

RawClient = redis_asyncio.Redis | RedisCluster


class Client(Protocol):
    """Every command names the key that decides which server of a cluster it goes to."""

    async def call(self, key: bytes | str, *command: Any) -> Any: ...

    async def call_everywhere(self, *command: Any) -> Sequence[Any]:
        """On all servers that may hold keys. Answers, or the errors they gave."""

    async def scan(self, key: bytes, cursor: int, pattern: bytes) -> tuple[int, Sequence[bytes]]:
        """Some keys of the server that has `key`, and the cursor to go on with, 0 at the end."""

    async def reconnect(self) -> None:
        """Drop all connections; the next command finds out anew where its server is."""

    async def aclose(self) -> None: ...


def make_client(url: str, timeout_s: float) -> Client:
    """Connects to nothing yet; `timeout_s` will bound that. Raises `OwnershipUnavailable` for an unreadable URL."""
    try:
        raw = make_raw_client(url, timeout_s)
    except ValueError as error:
        raise OwnershipUnavailable(f"Redis: {error}") from error
    return _ClusterClient(raw) if isinstance(raw, RedisCluster) else _ServerClient(raw)


def make_raw_client(url: str, timeout_s: float, **more: Any) -> RawClient:
    """redis-py's own client for any of these URLs."""
    scheme, _, rest = url.partition("://")
    base, _, mode = scheme.partition("+")
    # With a socket time-out redis-py wraps each send in asyncio.wait_for, which can swallow a cancellation.
    settings = {
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "max_connections": _MAX_CONNECTIONS,
        **more,
    }
    if not mode:
        return redis_asyncio.Redis.from_url(url, **settings)
    hosts, one = _hosts(base, rest, _DEFAULT_PORTS.get(mode, 0))
    if mode == "sentinel":
        return _behind_sentinel(hosts, one, settings)
    if mode == "cluster":
        told = _settings_in(one)
        told.pop("db", None)
        return RedisCluster(startup_nodes=[ClusterNode(*host) for host in hosts], **(told | settings))
    raise ValueError(f"{scheme}:// is no Redis URL: redis, rediss, unix, redis+sentinel and redis+cluster are known")


def _hosts(base: str, rest: str, default_port: int) -> tuple[list[tuple[str, int]], str]:
    """All hosts of a URL with several, and a URL that has the first one only."""
    parts = urlsplit(f"{base}://{rest}")
    user, at, places = parts.netloc.rpartition("@")
    hosts = []
    for place in places.split(","):
        one = urlsplit(f"{base}://{place.strip()}")
        if not one.hostname:
            raise ValueError(f"a host is missing in {safe_url(f'{base}://{rest}')}")
        hosts.append((one.hostname, one.port or default_port))
    return hosts, parts._replace(netloc=f"{user}{at}{places.split(',')[0].strip()}").geturl()


def _settings_in(url: str) -> dict[str, Any]:
    """User, password, database, TLS and whatever the query says."""
    told: dict[str, Any] = dict(parse_url(url))
    if told.pop("connection_class", None) is not None:
        told["ssl"] = True
    for name in ("host", "port"):
        told.pop(name, None)
    return told


def _behind_sentinel(hosts: list[tuple[str, int]], one: str, settings: dict[str, Any]) -> redis_asyncio.Redis:
    parts = urlsplit(one)
    service, _, db = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError(
            f"which service? redis+sentinel://host:port/SERVICE, as in `sentinel monitor`: {safe_url(one)}"
        )
    query = dict(parse_qsl(parts.query))
    asked = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    told = _settings_in(parts._replace(path=f"/{db}" if db else "", query=urlencode(query)).geturl())
    of_sentinels = settings | {name: value for name, value in asked.items() if value}
    of_sentinels |= {name: value for name, value in told.items() if name.startswith("ssl")}
    sentinel = Sentinel(hosts, sentinel_kwargs=of_sentinels, **(told | settings))  # type: ignore[no-untyped-call]
    client: redis_asyncio.Redis = sentinel.master_for(unquote(service))
    return client


class _ServerClient:
    def __init__(self, raw: redis_asyncio.Redis) -> None:
        self._raw = raw

    async def call(self, key: bytes | str, *command: Any) -> Any:
        return await self._raw.execute_command(*command)  # type: ignore[no-untyped-call]

    async def call_everywhere(self, *command: Any) -> Sequence[Any]:
        try:
            return [await self._raw.execute_command(*command)]  # type: ignore[no-untyped-call]
        except ResponseError as error:
            return [error]

    async def scan(self, key: bytes, cursor: int, pattern: bytes) -> tuple[int, Sequence[bytes]]:
        cursor, keys = await self.call(key, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        return int(cursor), keys

    async def reconnect(self) -> None:
        await self._raw.connection_pool.disconnect()

    async def aclose(self) -> None:
        await self._raw.aclose()
        sentinels = getattr(self._raw.connection_pool, "sentinel_manager", None)
        if sentinels is not None:
            await sentinels.aclose()


class _ClusterClient:
    """Names the node itself: redis-py would ask a server for the keys of each FCALL, sending all of it twice."""

    def __init__(self, raw: RedisCluster) -> None:
        self._raw = raw

    async def call(self, key: bytes | str, *command: Any) -> Any:
        await self._raw.initialize()
        node = self._raw.get_node_from_key(key if isinstance(key, str) else key.decode())
        return await self._raw.execute_command(*command, target_nodes=node)

    async def call_everywhere(self, *command: Any) -> Sequence[Any]:
        await self._raw.initialize()
        answers: list[Any] = []
        for node in self._raw.get_primaries():
            try:
                answers.append(await self._raw.execute_command(*command, target_nodes=node))
            except ResponseError as error:
                answers.append(error)
        return answers

    async def scan(self, key: bytes, cursor: int, pattern: bytes) -> tuple[int, Sequence[bytes]]:
        cursors, keys = await self.call(key, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        return int(next(iter(cursors.values()))), keys

    async def reconnect(self) -> None:
        await self._raw.aclose()

    async def aclose(self) -> None:
        await self._raw.aclose()


async def server_info(url: str, timeout_s: float = 5.0) -> dict[str, str]:
    """What the server tells of itself and its memory (INFO). Raises `OwnershipUnavailable`."""
    client = make_client(url, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            told = await client.call(b"", "INFO", "server", "memory")
    except ERRORS as error:
        raise OwnershipUnavailable(f"Redis at {safe_url(url)}: {advice(error)}") from error
    finally:
        await client.aclose()
    return {str(name): str(value) for name, value in told.items()}


def safe_url(url: str) -> str:
    """The URL without user and password, fit for logs."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"


ERRORS = (RedisError, RedisClusterException, OSError, TimeoutError)
"""All that a call may raise. RedisClusterException is a RedisError only in some versions of redis-py."""

PERMISSIONS = (
    "~{wh1:* ~wh1:* +fcall +fcall_ro +function|load +sadd +smembers +srem +scard +srandmember +hget +hset +hdel +hvals "
    "+hgetall +get +set +del +unlink +incr +exists +rpush +lpop +rename +time +info +scan +mget +cluster|slots +ping "
    "+client"
)
"""What an ACL user needs, as in `ACL SETUSER whohas on >PASSWORD ...`."""


def advice(error: BaseException) -> str:
    """What went wrong and what to do about it, in one line."""
    text = str(error) or type(error).__name__
    if isinstance(error, AuthenticationError) or text.startswith(("NOAUTH", "WRONGPASS")) or "NOAUTH" in text:
        return f"it refuses user or password ({text}); they belong into the URL: redis://user:password@host:port/0"
    if isinstance(error, NoPermissionError) or text.startswith("NOPERM"):
        return f"its user may not do all that is needed ({text}); ACL SETUSER USER {PERMISSIONS}"
    if isinstance(error, TimeoutError):
        return "no answer in time; is it overloaded, or is the address wrong?"
    if isinstance(error, ReadOnlyError):
        return f"it is a replica now ({text}); after a failover the address must lead to the new primary"
    if any(sign in text.lower() for sign in ("cluster support disabled", "cluster mode is not enabled")):
        return f"it is no cluster ({text}); use redis:// instead of redis+cluster://"
    if text.startswith("MOVED"):
        return f"it is one node of a cluster ({text}); use redis+cluster://"
    if isinstance(error, (RedisConnectionError, OSError, RedisClusterException)):
        return f"can't connect ({text}); is it running and reachable?"
    if "unknown command" in text.lower():
        return f"it has no functions ({text}); Redis 7.0 or Valkey 7.2 and later have them"
    return text
