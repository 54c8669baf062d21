"""The nouns that the read and the write path share. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""whohas' own chained hash of one KV block: 16 bytes (see `router.hashing`)."""

ReplicaId = NewType("ReplicaId", str)
"""Ray Serve's unique id of a replica; new for every start of its actor."""

Slot = NewType("Slot", int)
"""Short number (1..65535) of one incarnation of a member in the ownership map."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine will cache for one request.

    `token_ids` holds little-endian uint32 values, 4 bytes a token. `root` is the parent hash of the first block
    (model, adapter and salt live there). `reusable` is False where the engine recomputes the whole prompt whatever
    it holds (`echo` with log-probabilities, `prompt_logprobs`). `whole` is False where only the beginning is known, and
    more follows (see `router.media`).
    """

    token_ids: bytes
    root: BlockHash
    reusable: bool = True
    whole: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as the router needs it. `hashes`: its full blocks, in order; see `Prompt` for `reusable` and `whole`.
    Where it isn't whole, `num_tokens` is an estimate, more than the hashes stand for. `token_ids`: for the engine (see
    `router.handover`), empty unless the encoder was asked for them and may give them."""

    num_tokens: int
    hashes: Sequence[BlockHash]
    reusable: bool = True
    whole: bool = True
    token_ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Load:
    """What one router has booked on one replica, or the sum over routers.

    `prefill_tokens` are uncached prompt tokens of requests that have no first token yet (`num_waiting` of them);
    `num_decoding` requests have theirs.
    """

    num_waiting: int = 0
    num_decoding: int = 0
    prefill_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.num_waiting + other.num_waiting,
            self.num_decoding + other.num_decoding,
            self.prefill_tokens + other.prefill_tokens,
        )


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One candidate as the policy sees it.

    `owned_blocks`: longest prefix of the prompt that the replica's KV events say it holds. `overlap_blocks`: the same,
    counting blocks that requests in flight there are about to compute, and both less what the replica's broken promises
    cost it in `trust` (1: none).
    """

    replica_id: ReplicaId
    owned_blocks: int = 0
    overlap_blocks: int = 0
    load: Load = field(default_factory=Load)
    trust: float = 1.0


@dataclass(frozen=True, slots=True)
class Ranked:
    """One candidate with its price. `cost_s` in seconds, lower is better; `terms` add up to it."""

    view: ReplicaView
    cost_s: float
    terms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why. `candidates` are best first; the first one was taken."""

    prompt_tokens: int
    predicted_cached_tokens: int
    candidates: Sequence[Ranked]
    reason: str

    @property
    def replica_id(self) -> ReplicaId:
        return self.candidates[0].view.replica_id
