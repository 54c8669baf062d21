"""The ownership map in Redis or Valkey: thin calls of the functions in `lua/ownership.lua`."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import msgspec
from redis import asyncio as redis_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from router.errors import Fenced, OwnershipUnavailable
from router.hashing import HashChain
from router.ownership import Kind, Lease, Match, Record, ReplicaRecord, RouterRecord, Snapshot, Write
from router.types import BlockHash, Slot

_SCHEMA = 1
_KINDS: tuple[Kind, ...] = ("replica", "router")
_HEADER = struct.Struct(">ddHB")
_ENTRIES = struct.Struct(">HH")
_SLOT = struct.Struct(">H")
_FLEETS = f"wh{_SCHEMA}:fleets"
_HASHES_A_CALL = 1024
"""A call holds the server for about 2 us a block: longer lists are cut, so that look-ups get in between."""


def _library() -> tuple[str, str]:
    """Name and code of the function library. The name carries the code's digest: versions live side by side."""
    source = files("router.ownership").joinpath("lua/ownership.lua").read_text()
    name = f"whohas_{blake2b(source.encode(), digest_size=4).hexdigest()}"
    return name, source.replace("@LIBRARY@", name)


def key_prefix(fleet: str) -> str:
    """Every key of a fleet starts so. A hash tag, short because each block's key carries it."""
    return f"{{wh{_SCHEMA}:{blake2b(fleet.encode(), digest_size=4).hexdigest()}}}"


@dataclass(frozen=True, slots=True)
class Member:
    """One member as the map has it. `expires_in_s` is 0 or less once its lease has lapsed."""

    lease: Lease
    record: Record
    expires_in_s: float


class RedisOwnershipMap:
    """Implements `OwnershipMap` and `Sweeper`.

    `fleet` names application and model; fleets never see each other. `timeout_s` bounds every call but a connect's
    first, `connect`; there the functions are loaded and the server is checked.
    """

    def __init__(self, url: str, fleet: str, timeout_s: float = 1.0, look_up_timeout_s: float = 0.02) -> None:
        self.url = url
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._look_up_timeout_s = look_up_timeout_s
        self._prefix = key_prefix(fleet).encode()
        self._name, self._code = _library()
        # With a socket time-out redis-py wraps each send in asyncio.wait_for, which can swallow a cancellation; `_call`
        # bounds every call as a whole.
        self._client = redis_asyncio.Redis.from_url(
            url, protocol=2, socket_timeout=None, socket_connect_timeout=timeout_s
        )

    async def connect(self) -> None:
        """Load the functions. Raises `OwnershipUnavailable` with what to do about it."""
        try:
            async with asyncio.timeout(max(5.0, self._timeout_s)):
                await self._load()
                await self._client.sadd(_FLEETS, self._fleet)
        except (RedisError, OSError, TimeoutError) as error:
            raise OwnershipUnavailable(f"Redis at {safe_url(self.url)}: {_advice(error)}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def join(self, member: str, record: Record, lease_s: float) -> Lease:
        kind = _kind_of(record)
        slot, epoch = await self._call(
            "join", member, _KINDS.index(kind), msgspec.msgpack.encode(record), _milliseconds(lease_s)
        )
        return Lease(member, kind, Slot(slot), int(epoch))

    async def renew(self, lease: Lease, record: Record, lease_s: float) -> None:
        info = msgspec.msgpack.encode(record)
        kind = _KINDS.index(lease.kind)
        await self._call("renew", lease.member, lease.epoch, kind, info, _milliseconds(lease_s))

    async def leave(self, lease: Lease) -> None:
        await self._call("leave", lease.member, lease.epoch)

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        for part in _parts(writes):
            await self._call("write", lease.member, lease.epoch, *part)

    async def turn_journal(self, lease: Lease, done: bool) -> None:
        await self._call("turn_journal", lease.member, lease.epoch, int(done))

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        raw = hashes.raw if isinstance(hashes, HashChain) else b"".join(hashes)
        now, members, changes = await self._within(self._look_up_timeout_s, self._call("look_up", raw))
        return _snapshot(float(now), members, changes)

    async def _within(self, timeout_s: float, call: Coroutine[Any, Any, Any]) -> Any:
        """A limit on the server's time rather than on ours: where this process's own event loop was late, an answer
        that has arrived meanwhile still counts."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            for _ in range(3):  # turns of the loop: sockets are read, then the waiting are woken
                if not task.done():
                    await asyncio.sleep(0)
        finally:
            if not task.done():
                task.cancel()
        if task.cancelled() or not task.done():
            raise OwnershipUnavailable(f"Redis: no answer within {timeout_s:g} s") from TimeoutError()
        return task.result()

    async def members(self) -> list[Member]:
        """Everybody, replicas first, in order of their names; also those whose lease has lapsed."""
        now, members, _ = await self._call("look_up", b"")
        found = []
        for name, raw in zip(members[::2], members[1::2], strict=True):
            expires_at, epoch, slot, kind = _HEADER.unpack_from(raw)
            lease = Lease(name.decode(), _KINDS[kind], Slot(slot), int(epoch))
            record = _decode_record(kind, raw[_HEADER.size :])
            found.append(Member(lease, record, (expires_at - float(now)) / 1000))
        return sorted(found, key=lambda member: (member.lease.kind, member.lease.member))

    async def sweep(self, max_blocks: int, grace_s: float = 10.0) -> int:
        """`grace_s`: how long after its lease lapsed a member may still come back without writing all anew."""
        return int(await self._call("sweep", max_blocks, _milliseconds(grace_s)))

    async def _call(self, function: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._fcall(function, args)
                except ResponseError as error:
                    if "Function not found" not in str(error):
                        raise
                    await self._load()  # a server restarted empty, or flushed
                    return await self._fcall(function, args)
        except ResponseError as error:
            if str(error).startswith("FENCED"):
                raise Fenced(str(args[0])) from None
            raise OwnershipUnavailable(f"Redis: {_advice(error)}") from error
        except (RedisError, OSError, TimeoutError) as error:
            raise OwnershipUnavailable(f"Redis: {_advice(error)}") from error

    async def _fcall(self, function: str, args: Sequence[Any]) -> Any:
        command = "FCALL_RO" if function == "look_up" else "FCALL"
        return await self._client.execute_command(  # type: ignore[no-untyped-call]
            command, f"{self._name}_{function}", 1, self._prefix, *args
        )

    async def _load(self) -> None:
        try:
            await self._client.function_load(self._code)
        except ResponseError as error:
            if "already exists" not in str(error):
                raise


async def fleets(url: str, timeout_s: float = 5.0) -> list[str]:
    """Names of the fleets that have used this server. Raises `OwnershipUnavailable`."""
    client = redis_asyncio.Redis.from_url(url, protocol=2, socket_connect_timeout=timeout_s, socket_timeout=timeout_s)
    try:
        return sorted(bytes(name).decode() for name in await client.smembers(_FLEETS))  # type: ignore[arg-type]
    except (RedisError, OSError, TimeoutError) as error:
        raise OwnershipUnavailable(f"Redis at {safe_url(url)}: {_advice(error)}") from error
    finally:
        await client.aclose()


def safe_url(url: str) -> str:
    """The URL without user and password, fit for logs."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _advice(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        return "no answer in time; is it overloaded, or is the address wrong?"
    if isinstance(error, (RedisConnectionError, OSError)):
        return f"can't connect ({text}); is it running and reachable?"
    if "unknown command" in text.lower():
        return f"it has no functions ({text}); Redis 7.0 or Valkey 7.2 and later have them"
    return text


def _kind_of(record: Record) -> Kind:
    return "replica" if isinstance(record, ReplicaRecord) else "router"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _parts(writes: Sequence[Write]) -> Iterator[list[bytes]]:
    """Arguments of one `write` call after the other, each naming at most `_HASHES_A_CALL` hashes."""
    part: list[bytes] = []
    size = 0
    for owner, removed, added in _slices(writes):
        if size + len(removed) + len(added) > _HASHES_A_CALL and part:
            yield part
            part, size = [], 0
        part += [_SLOT.pack(owner), b"".join(removed), b"".join(added)]
        size += len(removed) + len(added)
    if part:
        yield part


def _slices(writes: Sequence[Write]) -> Iterator[tuple[Slot, Sequence[BlockHash], Sequence[BlockHash]]]:
    for change in writes:
        if len(change.removed) + len(change.added) <= _HASHES_A_CALL:
            yield change.owner, change.removed, change.added
            continue
        for start in range(0, len(change.removed), _HASHES_A_CALL):
            yield change.owner, change.removed[start : start + _HASHES_A_CALL], ()
        for start in range(0, len(change.added), _HASHES_A_CALL):
            yield change.owner, (), change.added[start : start + _HASHES_A_CALL]


@lru_cache(maxsize=4096)
def _decode_record(kind: int, raw: bytes) -> Record:
    return msgspec.msgpack.decode(raw, type=ReplicaRecord if _KINDS[kind] == "replica" else RouterRecord)


def _snapshot(now: float, members: Sequence[bytes], changes: Sequence[Any]) -> Snapshot:
    replicas: dict[Slot, ReplicaRecord] = {}
    routers: dict[Slot, RouterRecord] = {}
    for raw in members[1::2]:
        expires_at, _, slot, kind = _HEADER.unpack_from(raw)
        if expires_at <= now:
            continue
        record = _decode_record(kind, raw[_HEADER.size :])
        if isinstance(record, ReplicaRecord):
            replicas[Slot(slot)] = record
        else:
            routers[Slot(slot)] = record
    owned: dict[int, int] = {}
    overlap: dict[int, int] = {}
    for depth, entries in zip(changes[::2], changes[1::2], strict=True):
        for owner, claimant in _ENTRIES.iter_unpack(entries):
            record_of_owner = replicas.get(Slot(owner))
            if record_of_owner is None or not record_of_owner.trusted:
                continue
            if claimant == 0:
                owned[owner] = overlap[owner] = depth
            elif claimant in routers:
                overlap[owner] = depth
    matches = {Slot(slot): Match(owned.get(slot, 0), depth) for slot, depth in overlap.items()}
    return Snapshot(replicas, routers, matches)
