"""The handshake with every replica of a running fleet, on demand and from outside: what the map has must be what the
engine caches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from replicas import handshake
from replicas.engine_api import pinned
from router.errors import ModelNotFound, OwnershipUnavailable
from router.ownership import Match, Member, ReplicaRecord
from router.ownership.redis import RedisOwnershipMap
from router.prompt import PromptEncoder
from router.types import BlockHash, Slot
from serve.cli.preflight import DEMO_MODEL

_PATIENCE_S = 10.0
"""For each answer of the map: what a request wouldn't wait for is no fault of a replica's."""
_RENEWAL_S = 2.0
"""A replica without KV events has heard of none by then; one with events has, by its own handshake."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    wrong: bool
    text: str


async def examine(redis: str, fleet: str, encoder: PromptEncoder | None, adapters: Sequence[str]) -> list[Line]:
    """Raises `OwnershipUnavailable`. Without an `encoder` the fleet's own model name must say where its files are."""
    ownership = RedisOwnershipMap(redis, fleet, _PATIENCE_S, _PATIENCE_S)
    try:
        living = await _living(ownership)
        if any(record.seq < 0 for _, record in living):  # it may have joined just now: let it renew
            await asyncio.sleep(_RENEWAL_S)
            living = await _living(ownership)
        if not living:
            return [Line("fleet", False, f"{fleet}: no replica is running")]
        lines = [_block_sizes(fleet, [record for _, record in living])]
        for member, record in living:
            lines.append(await _replica(ownership, member, record, encoder, adapters))
        return lines
    finally:
        await ownership.close()


async def _living(ownership: RedisOwnershipMap) -> list[tuple[Member, ReplicaRecord]]:
    members = await ownership.members()
    return [(one, one.record) for one in members if isinstance(one.record, ReplicaRecord) and one.expires_in_s > 0]


def _block_sizes(fleet: str, records: Sequence[ReplicaRecord]) -> Line:
    sizes = sorted({record.block_size for record in records})
    if len(sizes) == 1:
        return Line("fleet", False, f"{fleet}: {len(records)} replicas, all with blocks of {sizes[0]} tokens")
    by_size = "; ".join(
        f"{size}: {', '.join(one.replica_id for one in records if one.block_size == size)}" for size in sizes
    )
    return Line("fleet", True, f"{fleet}: block sizes differ ({by_size}): start all engines with the same --block-size")


async def _replica(
    ownership: RedisOwnershipMap,
    member: Member,
    record: ReplicaRecord,
    encoder: PromptEncoder | None,
    adapters: Sequence[str],
) -> Line:
    name = f"replica {record.replica_id}"
    try:
        # The demo's name is no model's: its engines have the builtin tokenizer.
        encoder = encoder or PromptEncoder.load(record.model, "builtin" if record.model == DEMO_MODEL else "")
    except ModelNotFound as error:
        return Line(name, True, f"can't be checked without its tokenizer: give the config file ({error})")
    tells_events = record.seq >= 0
    engine = handshake.Engine(
        record.url,
        record.model,
        record.block_size,
        _holds(ownership, member.lease.slot) if tells_events else None,
        _heard(ownership, record.replica_id),
        pinned(record.dp_rank),
        ", or never reach the map",
    )
    try:
        findings = await handshake.shake_hands(engine, encoder, uuid4().hex, adapters)
    except (OSError, OwnershipUnavailable) as error:
        return Line(name, True, f"{record.url} got no answer to a canary ({error})")
    problems = [one.doubt for one in findings if one.doubt] or ([record.doubt] if record.doubt else [])
    if problems:
        return Line(name, True, f"does not cache what is computed for it: {'; '.join(problems)}")
    seen = "in the map and " if tells_events else "(no KV events) "
    return Line(name, False, f"canaries ({agreed(findings)}) are {seen}cached as computed{by_load(findings)}")


def agreed(findings: Sequence[handshake.Finding]) -> str:
    return ", ".join(one.variant for one in findings if not one.problem)


def by_load(findings: Sequence[handshake.Finding]) -> str:
    """What is routed by load without anything being wrong."""
    return "".join(f"; {one.variant} is routed by load: {one.problem}" for one in findings if one.problem)


def _heard(ownership: RedisOwnershipMap, replica_id: str) -> Callable[[], Awaitable[Mapping[str, int]]]:
    """What the replica says of its engine's events, with its last renewal."""

    async def heard() -> Mapping[str, int]:
        records = [record for _, record in await _living(ownership) if record.replica_id == replica_id]
        return {"batches": records[0].seq + 1, **records[0].unused} if records else {}

    return heard


def _holds(ownership: RedisOwnershipMap, slot: Slot) -> Callable[[Sequence[BlockHash]], Awaitable[bool]]:
    async def holds(hashes: Sequence[BlockHash]) -> bool:
        found = await ownership.look_up(hashes)
        return found.matches.get(slot, Match()).owned == len(hashes)

    return holds
