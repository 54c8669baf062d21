"""`Router`: from a request body to the replica that should have it.

    body -> token ids -> block hashes -> look-up -> rank -> reserve

Looking up is the only step that waits. Ranking and reserving happen in one go, so that of two requests arriving
together the second one sees what the first one booked.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from router.asked import (
    Asked,
    Placement,
    burst_key,
    credited,
    favourite,
    fleet_block_size,
    held_blocks,
    promised,
    proven,
    reason,
    slots,
)
from router.branches import BranchBook
from router.config import RouterConfig
from router.errors import RouterError, UnknownPrompt
from router.hashing import reusable_blocks
from router.load import Bookings
from router.media import estimated_tokens
from router.membership import Membership
from router.ownership import Lease, Match, OwnershipMap, RouterRecord, Snapshot, Write
from router.policies import Policy, Request, load_policy
from router.trust import TrustBook
from router.types import BlockHash, Decision, HashedPrompt, Load, ReplicaId, ReplicaView, Slot
from router.workers import Workers

_BYTES_A_TOKEN = 4

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
        self._prompts = prompts
        self._clock = clock
        self._policy: Policy = load_policy(config.policy)
        self._random = random.Random(seed)
        self._turn = self._random.randrange(1 << 16)
        self._bookings = Bookings(config.claim_s)
        self._trust = TrustBook()
        self._branches = BranchBook()
        self._lock = threading.Lock()  # Ray Serve may rank on another thread than the one that releases
        self._member = Membership(name, ownership, config, clock, self._to_tell, self.counters)
        self._workers = Workers()

    async def start(self) -> None:
        """Join the fleet. A map that can't be reached is no reason to fail: it is tried again and again."""
        self._workers.start()
        await self._member.start()

    async def close(self) -> None:
        self._workers.close()
        await self._member.close()

    @property
    def fleet(self) -> Snapshot:
        """Replicas and routers as last heard of; no matches."""
        return self._member.fleet

    @property
    def degraded(self) -> str:
        """Why decisions rest on load alone just now; "" when they don't."""
        return self._member.degraded

    @property
    def lease(self) -> Lease | None:
        """Its own, while it has one."""
        return self._member.lease

    async def route(self, path: str, body: Mapping[str, Any], size: int, candidates: Sequence[ReplicaId]) -> Placement:
        """Look up, rank, reserve. See `look_up` and `place`."""
        return self.place(await self.look_up(path, body, size), candidates)

    async def look_up(self, path: str, body: Mapping[str, Any], size: int) -> Asked:
        """What is known of this request. `size`: bytes of the body. Raises `InvalidRequest`, nothing else."""
        block_size = fleet_block_size(self.fleet) or fleet_block_size(await self._member.ask(()))
        try:
            prompt = await self._hashed(path, body, block_size or 1, size)
        except UnknownPrompt as error:
            self.counters[f"unknown_prompt.{error.reason}"] += 1
            snapshot = await self._member.ask(())
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
        block_size = fleet_block_size(snapshot) or 1
        told = await self._engines.hashed(self._random.choice(urls), path, body, block_size, error)
        self.counters["told_by_an_engine"] += told is not None
        return told

    async def _asked(self, prompt: HashedPrompt, block_size: int) -> Asked:
        hashes = prompt.hashes if block_size else ()
        reusable = reusable_blocks(prompt.num_tokens, block_size) if block_size and prompt.reusable else 0
        snapshot = await self._member.ask(hashes[:reusable])
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
            slot = slots(asked.snapshot).get(best.replica_id)
            uncached = max(0, asked.num_tokens - best.overlap_blocks * asked.block_size)
            sure = not asked.head_only or (slot is not None and credited(asked, slot))
            claimed = asked.hashes[best.owned_blocks :] if asked.reusable and sure else ()
            reservation = self._bookings.reserve(best.replica_id, slot, uncached, claimed, self._clock())
            if held := held_blocks(asked):
                self._branches.note(asked.hashes[held - 1])
            self._turn += 1
        self._member.changed.set()
        ids = asked.token_ids if slot is not None and proven(asked, slot) else b""
        return Placement(decision, reservation, promised(asked, slot), ids)

    def first_token(self, placement: Placement) -> None:
        """The engine has begun to answer. Once is enough; more often is harmless."""
        with self._lock:
            changed = self._bookings.first_token(placement.reservation)
        if changed:
            self._member.changed.set()

    def release(self, placement: Placement) -> None:
        """The request is over, however it ended. More often than once is harmless."""
        with self._lock:
            changed = self._bookings.release(placement.reservation, self._clock())
        if changed:
            self._member.changed.set()

    def observe(self, placement: Placement, reported: int) -> None:
        """The engine reported so many cached tokens in its answer. Compares with what was promised."""
        slot = placement.reservation.slot
        if slot is not None:
            with self._lock:
                self._trust.observe(slot, placement.promised, reported)

    def trust(self) -> Mapping[str, float]:
        """By replica id, for those in the map."""
        return {record.replica_id: self._trust.trust(slot) for slot, record in self.fleet.replicas.items()}

    def load(self, replica_id: ReplicaId) -> Load:
        """What this router alone has booked there."""
        return self._bookings.load(replica_id)

    def _decide(self, asked: Asked, candidates: Sequence[ReplicaId]) -> Decision:
        by_id, others = slots(asked.snapshot), self._loads_of_others(asked.snapshot)
        candidates = sorted(candidates)
        reusable = asked.hashes[: asked.reusable]
        views = [self._view(asked, reusable, replica, by_id.get(replica), others) for replica in candidates]
        held = held_blocks(asked)
        request = Request(
            asked.num_tokens,
            asked.block_size,
            draw=self._random.random(),
            turn=favourite(asked.session, candidates) if asked.session else self._turn,
            burst_key=burst_key(asked, views),
            shared_blocks=held if held and self._branches.often(asked.hashes[held - 1]) else 0,
        )
        ranked = self._policy.rank(request, views)
        predicted = ranked[0].view.overlap_blocks * asked.block_size
        return Decision(asked.num_tokens, predicted, ranked, reason(asked, ranked[0].view, views))

    def _view(
        self,
        asked: Asked,
        reusable: Sequence[BlockHash],
        replica: ReplicaId,
        slot: Slot | None,
        others: Mapping[int, Load],
    ) -> ReplicaView:
        load = self._bookings.load(replica)
        if slot is None:
            return ReplicaView(replica, load=load)
        load += others.get(slot, Load())
        if not credited(asked, slot):
            return ReplicaView(replica, load=load)
        match = asked.snapshot.matches.get(slot, Match())
        overlap = self._bookings.claimed_depth(slot, reusable, match.overlap)
        load = replace(load, prefill_tokens=max(0, load.prefill_tokens - self._twice(asked, reusable, slot, match)))
        trust = self._trust.trust(slot)
        owned, overlap = self._trust.credit(slot, match.owned), self._trust.credit(slot, overlap)
        return ReplicaView(replica, owned, overlap, load, trust)

    def _twice(self, asked: Asked, reusable: Sequence[BlockHash], slot: Slot, match: Match) -> int:
        """Tokens of this prompt's beginning that are booked at `slot` more than once: routers that hadn't heard of each
        other sent prompts there that share it, and the engine will compute it once."""
        ends = [end for router, end in match.claimed.items() if self.lease is None or router != self.lease.slot]
        ends.append(self._bookings.claimed_depth(slot, reusable, match.owned))
        return (sum(end - match.owned for end in ends) - (max(ends) - match.owned)) * asked.block_size

    def _to_tell(self, everything: bool) -> tuple[RouterRecord, Sequence[Write]]:
        with self._lock:
            if not self._bookings.expire(self._clock()):
                self._member.changed.set()
            self._trust.keep(self.fleet.replicas)
            record = RouterRecord(self._bookings.loads(), self._trust.doubted())
            return record, self._bookings.all_claims() if everything else self._bookings.take_writes()

    def _loads_of_others(self, snapshot: Snapshot) -> Mapping[int, Load]:
        total: dict[int, Load] = {}
        for router, record in snapshot.routers.items():
            if self.lease is not None and router == self.lease.slot:
                continue
            for slot, load in record.loads.items():
                total[slot] = total.get(slot, Load()) + load
        return total
