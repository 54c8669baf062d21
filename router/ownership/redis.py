"""The ownership map in Redis or Valkey: thin calls of the functions in `lua/ownership.lua`."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from importlib.resources import files
from typing import Any

import msgspec
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from router.errors import Fenced, OwnershipFull, OwnershipUnavailable
from router.hashing import HashChain
from router.ownership import Kind, Lease, Match, Member, Record, ReplicaRecord, RouterRecord, Snapshot, Write
from router.ownership.client import ERRORS, advice, make_client, safe_url
from router.tasks import TURNS, end, others_timeout
from router.types import BlockHash, Slot

_SCHEMA = 1
_KINDS: tuple[Kind, ...] = ("replica", "router")
_HEADER = struct.Struct(">ddHB")
_SLOT = struct.Struct(">H")
_FLEETS = f"wh{_SCHEMA}:fleets"
_HASH_BYTES = 16
_READING = ("look_up", "members", "missing")
_MAX_LATE = 256
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


class RedisOwnershipMap:
    """Implements `OwnershipMap`, `Sweeper` and `Auditor`.

    `url`: see `router.ownership.client`. `fleet` names application and model; fleets never see each other. `timeout_s`
    bounds every call but a connect's first, `connect`; there the functions are loaded and the server is checked.
    `look_up_timeout_s` is how long a caller waits for a look-up; the answer may come later, to keep the connection, up
    to the longer one of the two.
    """

    def __init__(self, url: str, fleet: str, timeout_s: float = 1.0, look_up_timeout_s: float = 0.02) -> None:
        self.url = url
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._look_up_timeout_s = look_up_timeout_s
        self._prefix = key_prefix(fleet).encode()
        self._name, self._code = _library()
        self._client = make_client(url, timeout_s)
        self._writes: dict[str, int] = {}  # by member: how many of its incarnation's the server has confirmed
        self._late: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def connect(self) -> None:
        """Load the functions. Raises `OwnershipUnavailable` with what to do about it."""
        try:
            async with self._open(), asyncio.timeout(max(5.0, self._timeout_s)):
                await self._load()
                await self._client.call(_FLEETS, "SADD", _FLEETS, self._fleet)
                await self._fcall("look_up", [b""])
        except ERRORS as error:
            raise OwnershipUnavailable(f"Redis at {safe_url(self.url)}: {advice(error)}") from error

    async def close(self) -> None:
        """For good: later calls raise `OwnershipUnavailable`."""
        self._closed = True
        for task in tuple(self._late):
            await end(task)
        await self._client.aclose()

    async def join(self, member: str, record: Record, lease_s: float) -> Lease:
        kind = _kind_of(record)
        slot, epoch = await self._call(
            "join", member, _KINDS.index(kind), msgspec.msgpack.encode(record), _milliseconds(lease_s)
        )
        self._writes[member] = 0
        return Lease(member, kind, Slot(slot), int(epoch))

    async def renew(self, lease: Lease, record: Record, lease_s: float, writes: Sequence[Write] = ()) -> None:
        renewal = (_KINDS.index(lease.kind), msgspec.msgpack.encode(record), _milliseconds(lease_s))
        await self._tell(lease, [*_parts(writes)] or [[]], renewal)

    async def leave(self, lease: Lease) -> None:
        await self._call("leave", lease.member, lease.epoch)

    async def write(self, lease: Lease, writes: Sequence[Write]) -> None:
        await self._tell(lease, [*_parts(writes)])

    async def _tell(self, lease: Lease, parts: Sequence[list[bytes]], renewal: Sequence[Any] = ()) -> None:
        """`renewal`: kind, record and lease (ms), renewed by the last part's call."""
        refused = 0
        for part in parts:
            refused += await self._tell_part(lease, part, renewal if part is parts[-1] else ())
        if refused:
            raise OwnershipFull(f"Redis: its memory is full, {refused} blocks were not added; raise maxmemory")

    async def _tell_part(self, lease: Lease, part: list[bytes], renewal: Sequence[Any]) -> int:
        """How many blocks the server had no room for."""
        number = self._writes.get(lease.member, 0) + bool(part)
        added = sum(map(len, part[2::3])) // _HASH_BYTES
        function = ("add_and_renew" if added else "renew") if renewal else ("add" if added else "remove")
        try:
            await self._call(function, lease.member, lease.epoch, number, *renewal, *part)
        except OwnershipFull:
            removals = [b"" if i % 3 == 2 else one for i, one in enumerate(part)] if any(part[1::3]) else []
            if removals or renewal:
                await self._tell_part(lease, removals, renewal)
            return added
        self._writes[lease.member] = number
        return 0

    async def turn_journal(self, lease: Lease, done: bool) -> None:
        await self._call("turn_journal", lease.member, lease.epoch, int(done))

    async def look_up(self, hashes: Sequence[BlockHash]) -> Snapshot:
        asking = self._call("look_up", _joined(hashes))
        now, members, changes = await self._within(self._look_up_timeout_s, asking)
        return _snapshot(float(now), members, changes)

    async def _within(self, timeout_s: float, call: Coroutine[Any, Any, Any]) -> Any:
        """A limit on the server's time rather than on ours: where this process's own event loop was late, an answer
        that has arrived meanwhile still counts. What is late goes on alone (`_call` bounds it): cut short, it would
        cost its connection, and the next one the time to open another, which may take longer than the limit.
        """
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            for _ in range(TURNS):
                if not task.done():
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return task.result()
        if len(self._late) < _MAX_LATE:
            self._late.add(task)
            task.add_done_callback(self._was_late)
        else:
            task.cancel()
        raise OwnershipUnavailable(f"Redis: no answer within {timeout_s:g} s") from TimeoutError()

    def _was_late(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # nobody waits for it any more

    async def members(self) -> list[Member]:
        """Everybody, replicas first, in order of their names; also those whose lease has lapsed."""
        now, members = await self._call("members")
        found = []
        for name, raw in zip(members[::2], members[1::2], strict=True):
            expires_at, epoch, slot, kind = _HEADER.unpack_from(raw)
            lease = Lease(name.decode(), _KINDS[kind], Slot(slot), int(epoch))
            record = _decode_record(kind, raw[_HEADER.size :])
            found.append(Member(lease, record, (expires_at - float(now)) / 1000, expires_at))
        return sorted(found, key=lambda member: (member.lease.kind, member.lease.member))

    async def sweep(self, max_blocks: int, grace_s: float = 10.0) -> int:
        return int(await self._call("sweep", max_blocks, _milliseconds(grace_s)))

    async def missing(self, lease: Lease, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        found: list[BlockHash] = []
        for start in range(0, len(hashes), _HASHES_A_CALL):
            asked = b"".join(hashes[start : start + _HASHES_A_CALL])
            gone = await self._call("missing", lease.member, lease.epoch, asked)
            found += [BlockHash(gone[i : i + _HASH_BYTES]) for i in range(0, len(gone), _HASH_BYTES)]
        return found

    async def holdings(self) -> AsyncIterator[list[tuple[BlockHash, bytes]]]:
        """All blocks with their entries (pairs of big-endian u16: owner slot, claimant slot or 0), in slices: a walk
        over all keys of the server, for an operator's check. What changes meanwhile may be seen or not."""
        cursor, start = 0, len(self._prefix) + 1
        while True:
            try:
                async with self._open(), asyncio.timeout(self._timeout_s):
                    cursor, keys = await self._client.scan(self._prefix, cursor, self._prefix + b"b*")
                    values = await self._client.call(self._prefix, "MGET", *keys) if keys else []
            except ERRORS as error:
                raise await self._refusal(error) from error
            yield [(BlockHash(key[start:]), value) for key, value in zip(keys, values, strict=True) if value]
            if not cursor:
                return

    async def _call(self, function: str, *args: Any) -> Any:
        longer_s = self._look_up_timeout_s if function == "look_up" else 0.0
        try:
            async with self._open(), others_timeout(max(self._timeout_s, longer_s)):
                try:
                    return await self._fcall(function, args)
                except ResponseError as error:
                    if "Function not found" not in str(error):
                        raise
                    await self._load()  # a server restarted empty, or flushed, or another one of a cluster
                    return await self._fcall(function, args)
        except ERRORS as error:
            if str(error).startswith("FENCED"):
                raise Fenced(str(args[0])) from None
            raise await self._refusal(error) from error

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Whatever uses the client is refused once it is closed, and leaves no connection of its own where it was
        closed meanwhile: redis-py connects anew for whoever asks it."""
        if self._closed:
            raise OwnershipUnavailable("Redis: this client is closed")
        try:
            yield
        finally:
            if self._closed:
                with suppress(*ERRORS):
                    await self._client.aclose()

    async def _refusal(self, error: BaseException) -> OwnershipFull | OwnershipUnavailable:
        if isinstance(error, OutOfMemoryError):
            return OwnershipFull(f"Redis: {advice(error)}")
        if isinstance(error, ReadOnlyError):
            # The address may lead to the new primary by now; open connections stay with the old one.
            await self._client.reconnect()
        return OwnershipUnavailable(f"Redis: {advice(error)}")

    async def _fcall(self, function: str, args: Sequence[Any]) -> Any:
        command = "FCALL_RO" if function in _READING else "FCALL"
        return await self._client.call(self._prefix, command, f"{self._name}_{function}", 1, self._prefix, *args)

    async def _load(self) -> None:
        for answer in await self._client.call_everywhere("FUNCTION LOAD", self._code):
            if isinstance(answer, Exception) and "already exists" not in str(answer):
                raise answer


async def fleets(url: str, timeout_s: float = 5.0) -> list[str]:
    """Names of the fleets that have used this server. Raises `OwnershipUnavailable`."""
    client = make_client(url, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            return sorted(bytes(name).decode() for name in await client.call(_FLEETS, "SMEMBERS", _FLEETS))
    except ERRORS as error:
        raise OwnershipUnavailable(f"Redis at {safe_url(url)}: {advice(error)}") from error
    finally:
        await client.aclose()


def _kind_of(record: Record) -> Kind:
    return "replica" if isinstance(record, ReplicaRecord) else "router"


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _joined(hashes: Sequence[BlockHash]) -> bytes:
    return hashes.raw if isinstance(hashes, HashChain) else b"".join(hashes)


def _parts(writes: Sequence[Write]) -> Iterator[list[bytes]]:
    """Arguments of one `write` call after the other, each naming at most `_HASHES_A_CALL` hashes."""
    part: list[bytes] = []
    size = 0
    for owner, removed, added in _slices(writes):
        if size + len(removed) + len(added) > _HASHES_A_CALL and part:
            yield part
            part, size = [], 0
        part += [_SLOT.pack(owner), _joined(removed), _joined(added)]
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
    for raw in members:
        expires_at, _, slot, kind = _HEADER.unpack_from(raw)
        if expires_at <= now:
            continue
        record = _decode_record(kind, raw[_HEADER.size :])
        if isinstance(record, ReplicaRecord):
            replicas[Slot(slot)] = record
        else:
            routers[Slot(slot)] = record
    deepest: dict[int, int] = {}  # by entry, in one number; changes come in order of their depth
    for depth, entries in zip(changes[::2], changes[1::2], strict=True):
        deepest.update(dict.fromkeys(struct.unpack(f">{len(entries) // 4}I", entries), depth))
    owned: dict[int, int] = {}
    overlap: dict[int, int] = {}
    claimed: defaultdict[int, dict[Slot, int]] = defaultdict(dict)
    for entry, depth in deepest.items():
        owner, claimant = entry >> 16, entry & 0xFFFF
        record_of_owner = replicas.get(Slot(owner))
        if record_of_owner is None or not record_of_owner.trusted or (claimant and claimant not in routers):
            continue
        overlap[owner] = max(depth, overlap.get(owner, 0))
        if claimant:
            claimed[owner][Slot(claimant)] = depth
        else:
            owned[owner] = depth
    matches = {}
    for slot, depth in overlap.items():
        held = owned.get(slot, 0)
        beyond = {claimant: end for claimant, end in claimed[slot].items() if end > held}
        matches[Slot(slot)] = Match(held, depth, beyond)
    return Snapshot(replicas, routers, matches)
