"""`Router`: from a request body to the replica that should have it.

    body -> token ids -> block hashes -> look-up -> rank -> reserve

Looking up is the only step that waits. Ranking and reserving happen in one go, so that of two requests arriving
together the second one sees what the first one booked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from xxhash import xxh3_64_intdigest

from router.branches import BranchBook
from router.config import RouterConfig
from router.errors import Fenced, OwnershipFull, OwnershipUnavailable, RouterError, UnknownPrompt
from router.hashing import reusable_blocks
from router.load import Bookings, Reservation
from router.media import estimated_tokens
from router.ownership import Lease, Match, OwnershipMap, RouterRecord, Snapshot, Write
from router.policies import Policy, Request, load_policy
from router.tasks import end
from router.trust import DOUBT, TrustBook
from router.types import BlockHash, Decision, HashedPrompt, Load, ReplicaId, ReplicaView, Slot
from router.workers import Workers

_RETRY_S = 0.5
"""How long after a failed look-up the map is left alone: a dead Redis must not cost every request the time-out."""
_LATE_IN_A_ROW = 3
_BYTES_A_TOKEN = 4
_JOURNAL_BLOCKS = 100_000
"""After so many claimed blocks a router joins anew, so that the map can forget what it wrote: little still stands."""

logger = logging.getLogger("whohas.router")


class PromptSource(Protocol):
    """Where token ids come from; `router.prompt.PromptEncoder` is one."""

    @property
    def off_loop_bytes(self) -> int:
        """Bodies above this size are worked on in a thread."""

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt: ...


class EngineSource(Protocol):
    """Asks an engine for what a `PromptSource` can't tell; `serve.engine_prompts` is one."""

    async def hashed(
        self, url: str, path: str, body: Mapping[str, Any], block_size: int, error: UnknownPrompt
    ) -> HashedPrompt | None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request with all that is known about its prompt, not placed yet.

    `hashes`: every full block; an engine can reuse the first `reusable` of them. `head_only`: what follows them is not
    known, for there are media in it. `note` says why nothing is known. `session` stands for its conversation, where its
    client told: among replicas of equal cost it has a favourite. `token_ids` as in `HashedPrompt`.
    """

    num_tokens: int
    block_size: int = 0
    hashes: Sequence[BlockHash] = ()
    reusable: int = 0
    snapshot: Snapshot = field(default_factory=Snapshot)
    note: str = ""
    session: int = 0
    head_only: bool = False
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision and what it booked; the holder must release the reservation exactly when the request is over.

    `promised`: cached tokens by the replica's own events: without claims, which others may have given up meanwhile, and
    without any discount for earlier promises that were not kept. `token_ids`: for the engine, see `router.handover`;
    empty for one that has not shown that it has the same ids.
    """

    decision: Decision
    reservation: Reservation
    promised: int = 0
    token_ids: bytes = b""


class Router:
    """One router of the fleet. `clock` in seconds, monotonic; `name` must be unique in the fleet."""

    def __init__(
        self,
        name: str,
        prompts: PromptSource,
        ownership: OwnershipMap,
        config: RouterConfig,
        clock: Callable[[], float],
        seed: int | None = None,
        engines: EngineSource | None = None,
    ) -> None:
        self.name = name
        self._engines = engines
        self.counters: Counter[str] = Counter()
        self.degraded = ""  # why decisions rest on load alone just now; "" when they don't
        self._prompts = prompts
        self._map = ownership
        self._config = config
        self._clock = clock
        self._policy: Policy = load_policy(config.policy)
        self._random = random.Random(seed)
        self._turn = self._random.randrange(1 << 16)
        self._bookings = Bookings(config.claim_s)
        self._trust = TrustBook()
        self._branches = BranchBook()
        self._lock = threading.Lock()  # Ray Serve may rank on another thread than the one that releases
        self._fleet = Snapshot()
        self._lease: Lease | None = None
        self._written = self._late = 0
        self._changed = asyncio.Event()
        self._teller: asyncio.Task[None] | None = None
        self._retry_at = self._fleet_at = float("-inf")
        self._workers = Workers()

    async def start(self) -> None:
        """Join the fleet. A map that can't be reached is no reason to fail: it is tried again and again."""
        self._workers.start()
        await self._tell()
        self._teller = asyncio.create_task(self._keep_telling(), name="whohas-teller")

    async def close(self) -> None:
        self._workers.close()
        await end(self._teller)
        if self._lease is not None:
            with contextlib.suppress(OwnershipUnavailable):
                await self._map.leave(self._lease)

    @property
    def fleet(self) -> Snapshot:
        """Replicas and routers as last heard of; no matches."""
        return self._fleet

    async def route(self, path: str, body: Mapping[str, Any], size: int, candidates: Sequence[ReplicaId]) -> Placement:
        """Look up, rank, reserve. See `look_up` and `place`."""
        return self.place(await self.look_up(path, body, size), candidates)

    async def look_up(self, path: str, body: Mapping[str, Any], size: int) -> Asked:
        """What is known of this request. `size`: bytes of the body. Raises `InvalidRequest`, nothing else."""
        block_size = _block_size(self._fleet) or _block_size(await self._ask(()))
        try:
            prompt = await self._hashed(path, body, block_size or 1, size)
        except UnknownPrompt as error:
            self.counters[f"unknown_prompt.{error.reason}"] += 1
            snapshot = await self._ask(())
            if told := await self._told_by_an_engine(path, body, snapshot, error):
                return await self._asked(told, block_size)
            tokens = estimated_tokens(body) if error.reason == "multimodal" else size // _BYTES_A_TOKEN
            return Asked(tokens, snapshot=snapshot, note=f"no token ids: {error}")
        return await self._asked(prompt, block_size)

    async def _told_by_an_engine(
        self, path: str, body: Mapping[str, Any], snapshot: Snapshot, error: UnknownPrompt
    ) -> HashedPrompt | None:
        urls = [record.url for record in snapshot.replicas.values() if record.url]
        if self._engines is None or not urls:
            return None
        block_size = _block_size(snapshot) or 1
        told = await self._engines.hashed(self._random.choice(urls), path, body, block_size, error)
        self.counters["told_by_an_engine"] += told is not None
        return told

    async def _asked(self, prompt: HashedPrompt, block_size: int) -> Asked:
        hashes = prompt.hashes if block_size else ()
        reusable = reusable_blocks(prompt.num_tokens, block_size) if block_size and prompt.reusable else 0
        snapshot = await self._ask(hashes[:reusable])
        note = self.degraded or ("" if prompt.reusable else "the engine recomputes this prompt")
        if not prompt.whole:
            self.counters["head_only"] += 1
            if not any(record.media for record in snapshot.replicas.values()):
                note = note or "no token ids: multimodal: no engine has shown what it caches before media"
        asked = Asked(prompt.num_tokens, block_size, hashes, reusable, snapshot, note)
        return replace(asked, head_only=not prompt.whole, token_ids=prompt.token_ids)

    async def _hashed(self, path: str, body: Mapping[str, Any], block_size: int, size: int) -> HashedPrompt:
        try:
            if size > self._prompts.off_loop_bytes:
                return await self._workers.run(self._prompts.hashed, path, body, block_size)
            return self._prompts.hashed(path, body, block_size)
        except RouterError:
            raise
        except Exception as error:  # a tokenizer or template that fails must cost a hit, not the request
            logger.exception("a prompt could not be told")
            raise UnknownPrompt("failed", type(error).__name__) from error

    def decide(self, asked: Asked, candidates: Sequence[ReplicaId]) -> Decision:
        """Rank without booking anything. `candidates` must not be empty."""
        with self._lock:
            return self._decide(asked, candidates)

    def place(self, asked: Asked, candidates: Sequence[ReplicaId]) -> Placement:
        """Rank and book the best. `candidates` must not be empty."""
        with self._lock:
            decision = self._decide(asked, candidates)
            best = decision.candidates[0].view
            slot = _slots(asked.snapshot).get(best.replica_id)
            uncached = max(0, asked.num_tokens - best.overlap_blocks * asked.block_size)
            sure = not asked.head_only or (slot is not None and _credited(asked, slot))
            claimed = asked.hashes[best.owned_blocks :] if asked.reusable and sure else ()
            reservation = self._bookings.reserve(best.replica_id, slot, uncached, claimed, self._clock())
            if held := _held_blocks(asked):
                self._branches.note(asked.hashes[held - 1])
            self._turn += 1
        self._changed.set()
        ids = asked.token_ids if slot is not None and _proven(asked, slot) else b""
        return Placement(decision, reservation, _promised(asked, slot), ids)

    def first_token(self, placement: Placement) -> None:
        """The engine has begun to answer. Once is enough; more often is harmless."""
        with self._lock:
            changed = self._bookings.first_token(placement.reservation)
        if changed:
            self._changed.set()

    def release(self, placement: Placement) -> None:
        """The request is over, however it ended. More often than once is harmless."""
        with self._lock:
            changed = self._bookings.release(placement.reservation, self._clock())
        if changed:
            self._changed.set()

    def observe(self, placement: Placement, reported: int) -> None:
        """The engine reported so many cached tokens in its answer. Compares with what was promised."""
        slot = placement.reservation.slot
        if slot is not None:
            with self._lock:
                self._trust.observe(slot, placement.promised, reported)

    def trust(self) -> Mapping[str, float]:
        """By replica id, for those in the map."""
        return {record.replica_id: self._trust.trust(slot) for slot, record in self._fleet.replicas.items()}

    def load(self, replica_id: ReplicaId) -> Load:
        """What this router alone has booked there."""
        return self._bookings.load(replica_id)

    def _decide(self, asked: Asked, candidates: Sequence[ReplicaId]) -> Decision:
        slots, others = _slots(asked.snapshot), self._loads_of_others(asked.snapshot)
        candidates = sorted(candidates)
        views = [self._view(asked, replica, slots.get(replica), others) for replica in candidates]
        held = _held_blocks(asked)
        request = Request(
            asked.num_tokens,
            asked.block_size,
            draw=self._random.random(),
            turn=_favourite(asked.session, candidates) if asked.session else self._turn,
            burst_key=_burst_key(asked, views),
            shared_blocks=held if held and self._branches.often(asked.hashes[held - 1]) else 0,
        )
        ranked = self._policy.rank(request, views)
        predicted = ranked[0].view.overlap_blocks * asked.block_size
        return Decision(asked.num_tokens, predicted, ranked, _reason(asked, ranked[0].view, views))

    def _view(self, asked: Asked, replica: ReplicaId, slot: Slot | None, others: Mapping[int, Load]) -> ReplicaView:
        load = self._bookings.load(replica)
        if slot is None:
            return ReplicaView(replica, load=load)
        load += others.get(slot, Load())
        if not _credited(asked, slot):
            return ReplicaView(replica, load=load)
        match = asked.snapshot.matches.get(slot, Match())
        overlap = self._bookings.claimed_depth(slot, asked.hashes[: asked.reusable], match.overlap)
        trust = self._trust.trust(slot)
        owned, overlap = self._trust.credit(slot, match.owned), self._trust.credit(slot, overlap)
        return ReplicaView(replica, owned, overlap, load, trust)

    def _loads_of_others(self, snapshot: Snapshot) -> Mapping[int, Load]:
        total: dict[int, Load] = {}
        for router, record in snapshot.routers.items():
            if self._lease is not None and router == self._lease.slot:
                continue
            for slot, load in record.loads.items():
                total[slot] = total.get(slot, Load()) + load
        return total

    async def _ask(self, hashes: Sequence[BlockHash]) -> Snapshot:
        """The map's answer, or, while it can't be had in time, the last known members without any match."""
        if self._clock() >= self._retry_at:
            try:
                snapshot = await self._map.look_up(hashes)
            except OwnershipUnavailable as error:
                self._unavailable(error)
            else:
                self._available(snapshot)
                return snapshot
        self.counters["look_up_skipped"] += 1
        return Snapshot(replicas=self._fleet.replicas)

    def _available(self, snapshot: Snapshot) -> None:
        if self.degraded:
            logger.info("the ownership map answers again")
        self.degraded, self._retry_at, self._late = "", float("-inf"), 0
        self._fleet, self._fleet_at = Snapshot(snapshot.replicas, snapshot.routers), self._clock()

    def _unavailable(self, error: OwnershipUnavailable) -> None:
        if not self.degraded:
            logger.warning("routing by load alone: %s", error)
        self.counters["map_unavailable"] += 1
        self.degraded = str(error)
        self._late = self._late + 1 if isinstance(error.__cause__, TimeoutError) else _LATE_IN_A_ROW
        if self._late >= _LATE_IN_A_ROW:  # one late answer says little; several, or none at all, say it is down
            self._retry_at = self._clock() + _RETRY_S

    async def _keep_telling(self) -> None:
        """Tell the fleet what is booked here: at once when it changes, and often enough to keep the lease."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.lease_s / 3):
                    await self._changed.wait()
            self._changed.clear()
            if not await self._tell():
                await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> bool:
        with self._lock:
            self._bookings.expire(self._clock())
            self._trust.keep(self._fleet.replicas)
            record = RouterRecord(self._bookings.loads(), self._trust.doubted())
            writes = self._bookings.take_writes() if self._lease else self._bookings.all_claims()
        try:
            if self._lease is None:
                self._lease = await self._map.join(self.name, record, self._config.lease_s)
                await self._write(self._lease, writes)
            else:  # claims first: who sees a replica busy must also see with what
                await self._write(self._lease, writes)
                await self._map.renew(self._lease, record, self._config.lease_s)
            self._written += sum(len(write.added) for write in writes)
            if self._written > _JOURNAL_BLOCKS:
                self._lease, self._written = None, 0
                self._changed.set()
            if self.degraded or self._clock() >= self._fleet_at + self._config.lease_s / 3:
                self._available(await self._map.look_up(()))
        except Fenced:
            self._lease = None
            self._changed.set()
        except OwnershipUnavailable as error:
            self._lease = None  # what was to be told may be lost: join anew and tell all
            self._unavailable(error)
            return False
        return True

    async def _write(self, lease: Lease, claims: Sequence[Write]) -> None:
        try:
            await self._map.write(lease, claims)
        except OwnershipFull:  # others see less of what is claimed here; what is held still counts
            self.counters["claims_refused"] += 1


def _favourite(session: int, candidates: Sequence[ReplicaId]) -> int:
    """Index of the replica that this conversation has first turn at; most keep theirs when replicas come and go."""
    return max(range(len(candidates)), key=lambda i: xxh3_64_intdigest(candidates[i].encode(), session))


def _slots(snapshot: Snapshot) -> dict[str, Slot]:
    return {record.replica_id: slot for slot, record in snapshot.replicas.items()}


def _credited(asked: Asked, slot: Slot) -> bool:
    """May this replica's blocks be compared with the prompt's, and relied on?"""
    record = asked.snapshot.replicas[slot]
    comparable = record.media or not asked.head_only
    return record.trusted and record.block_size == asked.block_size and comparable


def _proven(asked: Asked, slot: Slot) -> bool:
    """Has this replica's engine shown that it makes the same ids of a prompt?"""
    return _credited(asked, slot) and not asked.snapshot.replicas[slot].doubt


def _promised(asked: Asked, slot: Slot | None) -> int:
    if slot is None or not _credited(asked, slot):
        return 0
    return asked.snapshot.matches.get(slot, Match()).owned * asked.block_size


def _block_size(snapshot: Snapshot) -> int:
    """The fleet's block size; where replicas differ, that of most of them. 0 while none is known."""
    sizes = Counter(record.block_size for record in snapshot.replicas.values())
    return sizes.most_common(1)[0][0] if sizes else 0


def _held_blocks(asked: Asked) -> int:
    """The longest prefix that anybody holds by its events."""
    return max((match.owned for match in asked.snapshot.matches.values()), default=0)


def _burst_key(asked: Asked, views: Sequence[ReplicaView]) -> int | None:
    longest = max(view.overlap_blocks for view in views)
    if longest <= max(view.owned_blocks for view in views):
        return None
    return int.from_bytes(asked.hashes[longest - 1][:4], "little")


def _reason(asked: Asked, best: ReplicaView, views: Sequence[ReplicaView]) -> str:
    if asked.note:
        return f"by load alone: {asked.note}"
    longest = max(view.overlap_blocks for view in views)
    doubted = [view.replica_id for view in views if view.trust < DOUBT]
    if doubted:
        return f"by what is held, but {', '.join(doubted)} reused far less than its events promised and is discounted"
    if longest == 0:
        return "nobody holds a block of this prompt: the least busy replica"
    held = f"{best.overlap_blocks} of {len(asked.hashes)} blocks held"
    if best.overlap_blocks == longest:
        return f"{held}, the most anywhere, at the lowest cost"
    return f"{held}; another replica holds {longest} but costs more"
