"""`whohas map`: who is in the fleet, and how much does everybody hold and do?"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from router.errors import OwnershipUnavailable
from router.ownership import Member, ReplicaRecord, RouterRecord
from router.ownership.redis import RedisOwnershipMap, fleets
from router.types import Load
from serve.cli import state
from serve.cli.map_check import Result, check
from serve.config import DEFAULT_REDIS

_PATIENCE_S = 10.0  # whoever types a command waits for a busy server, as no request would


@click.command("map")
@click.option("--redis", "url", help="Redis URL.  [default: $WHOHAS_REDIS, the running `whohas up`, or 127.0.0.1:6379]")
@click.option("--fleet", help="Only this fleet.  [default: all there are]")
@click.option("--check", "checks", is_flag=True, help="Compare what the map says with what the collectors hold.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def map_command(url: str | None, fleet: str | None, checks: bool, as_json: bool) -> None:
    """Show the ownership map: replicas and routers with their epochs, leases, blocks owned and load.

    --check walks over all keys, in slices; exit status 1 where the map is wrong. Collectors compare and repair by
    themselves, a few blocks at a time.
    """
    redis = url or os.environ.get("WHOHAS_REDIS") or state.read().get("redis", DEFAULT_REDIS)
    try:
        if checks:
            _show_check(asyncio.run(_check(redis, fleet)), as_json)
            return
        found = asyncio.run(_read(redis, fleet))
    except OwnershipUnavailable as error:
        click.echo(f"whohas: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps({name: _as_json(members) for name, members in found.items()}, indent=2))
        return
    if not found:
        click.echo("no fleet has used this Redis yet")
    for name, members in found.items():
        _show(name, members)


async def _check(redis: str, fleet: str | None) -> dict[str, Result]:
    results = {}
    for name in [fleet] if fleet else await fleets(redis, _PATIENCE_S):
        ownership = RedisOwnershipMap(redis, name, timeout_s=_PATIENCE_S)
        try:
            await ownership.connect()
            results[name] = await check(ownership)
        finally:
            await ownership.close()
    return results


def _show_check(results: dict[str, Result], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({name: asdict(result) for name, result in results.items()}, indent=2))
    for name, result in results.items() if not as_json else ():
        click.echo(
            f"{name}: {result.claims} claims, {result.left_behind} entries of ended members (swept by collectors)"
        )
        for one in result.replicas:
            click.echo(f"  {one.replica:<20}{one.state:>10}{one.in_map:>9} blocks in the map{one.told:>9} held")
    sys.exit(any(result.wrong for result in results.values()))


async def _read(redis: str, fleet: str | None) -> dict[str, list[Member]]:
    found = {}
    for name in [fleet] if fleet else await fleets(redis, _PATIENCE_S):
        ownership = RedisOwnershipMap(redis, name, timeout_s=_PATIENCE_S)
        try:
            await ownership.connect()
            found[name] = await ownership.members()
        finally:
            await ownership.close()
    return found


def _loads(members: list[Member]) -> dict[int, Load]:
    total: dict[int, Load] = {}
    for member in members:
        if isinstance(member.record, RouterRecord) and member.expires_in_s > 0:
            for slot, load in member.record.loads.items():
                total[slot] = total.get(slot, Load()) + load
    return total


def _show(name: str, members: list[Member]) -> None:
    loads = _loads(members)
    replicas = [(one, one.record) for one in members if isinstance(one.record, ReplicaRecord)]
    routers = [one for one in members if isinstance(one.record, RouterRecord)]
    click.echo(f"{name}: {len(replicas)} replicas, {len(routers)} routers")
    click.echo(
        f"  {'replica':<20}{'epoch':>15}{'lease':>8}{'blocks':>9}{'seq':>9}{'waiting':>9}{'decoding':>10}"
        f"{'prefill tokens':>16}  url"
    )
    for member, record in replicas:
        load = loads.get(member.lease.slot, Load())
        rank = "" if record.dp_rank is None else f" rank {record.dp_rank}"
        mark = rank if record.trusted else f"{rank}  no credit: {record.doubt or 'not sure of its blocks just now'}"
        if record.unused:
            mark += f"  unused events: {', '.join(f'{name} {count}' for name, count in sorted(record.unused.items()))}"
        click.echo(
            f"  {record.replica_id:<20}{member.lease.epoch:>15}{_lease(member):>8}{record.blocks:>9}{record.seq:>9}"
            f"{load.num_waiting:>9}{load.num_decoding:>10}{load.prefill_tokens:>16}  {record.url}{mark}"
        )
    for member in routers:
        click.echo(f"  {member.lease.member:<20}{member.lease.epoch:>15}{_lease(member):>8}")


def _lease(member: Member) -> str:
    return f"{member.expires_in_s:.1f}s" if member.expires_in_s > 0 else "over"


def _as_json(members: list[Member]) -> dict[str, Any]:
    loads = _loads(members)
    rows: dict[str, list[dict[str, Any]]] = {"replicas": [], "routers": []}
    for member in members:
        common = {"epoch": member.lease.epoch, "lease_s": member.expires_in_s}
        if isinstance(member.record, ReplicaRecord):
            record, load = member.record, loads.get(member.lease.slot, Load())
            rows["replicas"].append(
                {
                    "replica": record.replica_id,
                    **common,
                    "model": record.model,
                    "url": record.url,
                    "dp_rank": record.dp_rank,
                    "block_size": record.block_size,
                    "blocks": record.blocks,
                    "seq": record.seq,
                    "trusted": record.trusted,
                    "doubt": record.doubt,
                    "unused_events": dict(record.unused),
                    "num_waiting": load.num_waiting,
                    "num_decoding": load.num_decoding,
                    "prefill_tokens": load.prefill_tokens,
                }
            )
        else:
            rows["routers"].append({"router": member.lease.member, **common})
    return rows
