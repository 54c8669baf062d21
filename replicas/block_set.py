"""The authoritative set of one engine's KV blocks, fed by its events, in whohas' own hashes.

A node is one block the engine told about, known by the engine's hash, and hangs under its parent:

    (root) --> A held --> B held --> C gone --> D held        published: A, B
                     \\-> E held                               published: E

What is *published* is prefix-closed: a block only while it and all its ancestors are held. C's descendants stay
known, and come back by themselves when C is stored again. A block whose parent is unknown is *parked*: its tokens wait
until the parent turns up, because a child taken for a root would give credit to the wrong prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from replicas.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineBlockHash, KVEventBatch
from replicas.extra_keys import UnreadableKeys, read_extra_keys
from router.hashing import TOKEN_BYTES, chain, root_hash
from router.types import BlockHash

_DENSE_KINDS = frozenset((None, "full_attention", "mla_attention", "mla", "sink_full_attention"))
_GPU = frozenset((None, "GPU"))


@dataclass(frozen=True, slots=True)
class Changes:
    """Net effect of one batch on the published blocks; a block is in at most one of the two."""

    added: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()


class _Node:
    """`refs`: copies the engine holds. `own` is None while parked; `pending` then keeps (tokens, extra) of the block.
    A node with neither is only known as somebody's parent."""

    __slots__ = ("children", "engine_hash", "own", "parent", "pending", "published", "refs")

    def __init__(self, engine_hash: EngineBlockHash, parent: _Node | None) -> None:
        self.engine_hash = engine_hash
        self.parent = parent
        self.own: BlockHash | None = None
        self.refs = 0
        self.published = False
        self.pending: tuple[bytes, bytes | None] | None = None
        self.children: set[_Node] | None = None
        if parent is None:
            return
        if parent.children is None:
            parent.children = {self}
        else:
            parent.children.add(self)

    def adopt(self, child: _Node) -> None:
        child.parent = self
        if self.children is None:
            self.children = set()
        self.children.add(child)


class BlockSet:
    """`model`: the base model's served name. `block_size`: tokens, the engine's own, as its prompts are hashed.

    At most `max_parked` blocks wait for a parent; further ones are dropped and counted. `offloaded`: blocks that lie in
    another tier than the GPU's memory, by the engine's names; they are told of, and no credit.
    `counters`: stored, removed, duplicates (a further copy stored), reports (blocks told again without a copy),
    unknown_removals, parked, attached, parked_dropped, cleared, ignored, broken, and skipped_* by reason: medium,
    remote, kind, group, shape, block_size, lora, extra_keys.
    """

    def __init__(self, model: str, block_size: int, max_parked: int = 16_384) -> None:
        self.block_size = block_size
        self.seen_block_size: int | None = None
        self.counters: Counter[str] = Counter()
        self.parked = 0
        self.offloaded: set[EngineBlockHash] = set()
        self._model = model
        self._max_parked = max_parked
        self._nodes: dict[EngineBlockHash, _Node] = {}
        self._group: int | None = None
        # Two engine hashes can be one block to whohas (a reloaded adapter), so publications are counted.
        self._published: dict[BlockHash, int] = {}
        self._net: dict[BlockHash, bool] = {}
        self.digest = 0
        """Of what is published: the exclusive or of every hash's first 8 bytes, big-endian."""

    @property
    def published(self) -> AbstractSet[BlockHash]:
        return self._published.keys()

    def __len__(self) -> int:
        return len(self._published)

    def __repr__(self) -> str:
        return f"BlockSet(published={len(self)}, known={len(self._nodes)}, parked={self.parked})"

    def apply(self, batch: KVEventBatch) -> Changes:
        self._net = {}
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear(event)
        for name, counts in (("ignored", batch.ignored), ("broken", batch.broken)):
            if counts:
                self.counters[name] += sum(counts.values())
        net = self._net
        return Changes([h for h, there in net.items() if there], [h for h, there in net.items() if not there])

    # --- stored -----------------------------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> None:
        if event.medium not in _GPU:
            self.offloaded.update(event.block_hashes)
        reason = self._skip_reason(event)
        if reason is not None:
            self.counters[f"skipped_{reason}"] += len(event.block_hashes) or 1
            return
        try:
            salt, extras = read_extra_keys(event)
        except UnreadableKeys:
            self.counters["skipped_extra_keys"] += len(event.block_hashes)
            return
        parent: _Node | None = None
        base: BlockHash | None
        if event.parent_block_hash is None:
            base = root_hash(self._model, event.lora_name, salt)
        else:
            parent = self._nodes.get(event.parent_block_hash)
            base = parent.own if parent is not None else None
            if base is None and self.parked + len(event.block_hashes) > self._max_parked:
                self.counters["parked_dropped"] += len(event.block_hashes)
                return
            if parent is None:
                parent = self._nodes[event.parent_block_hash] = _Node(event.parent_block_hash, None)
        self.counters["stored"] += len(event.block_hashes)
        if base is not None:
            self._store_known(event, parent, chain(base, event.token_ids, self.block_size, extras))
        else:
            self._store_parked(event, parent, extras)

    def _skip_reason(self, event: BlockStored) -> str | None:
        """Only what a GPU prefix hit needs: dense blocks of one full-attention group, hashed as prompts are."""
        if event.medium not in _GPU:
            return "medium"
        if event.locality == "REMOTE":
            return "remote"
        if event.kv_cache_spec_kind not in _DENSE_KINDS:
            return "kind"
        if event.kv_cache_spec_kind is None and event.kv_cache_spec_sliding_window is not None:
            return "kind"
        hashes = event.block_hashes
        if not hashes or len(event.token_ids) != len(hashes) * event.block_size * TOKEN_BYTES:
            return "shape"
        self.seen_block_size = event.block_size
        if event.block_size != self.block_size:
            return "block_size"
        if event.lora_id is not None and event.lora_name is None:
            return "lora"
        if event.group_idx is not None:
            # Several dense groups hold the same chains: the first one seen stands for all.
            if self._group is None:
                self._group = event.group_idx
            elif event.group_idx != self._group:
                return "group"
        return None

    def _store_known(self, event: BlockStored, parent: _Node | None, owns: Sequence[BlockHash]) -> None:
        """Blocks whose place is known.

        An event that begins at the root and has several blocks, some of them held, tells of cache hits (vLLM's
        `kv_cache_report_mode: full`); it looks like any other. Real second copies come from twins that computed the
        same block side by side: such an event begins where their common cached prefix ends, or has one block. Taking
        hits for copies would keep the blocks credited after the engine evicted them.
        """
        nodes = self._nodes
        may_be_hits = event.parent_block_hash is None and len(event.block_hashes) > 1
        for engine_hash, own in zip(event.block_hashes, owns, strict=True):
            node = nodes.get(engine_hash)
            if node is None:
                node = nodes[engine_hash] = _Node(engine_hash, parent)
                node.own = own
                node.refs = 1
            elif not node.refs:
                node.refs = 1
            elif may_be_hits:
                self.counters["reports"] += 1
            else:
                node.refs += 1
                self.counters["duplicates"] += 1
            if node.own is None:
                self._resolve(node, parent, own)
            elif not node.published:
                self._publish(node)
            parent = node

    def _store_parked(self, event: BlockStored, parent: _Node | None, extras: Sequence[bytes | None] | None) -> None:
        width = self.block_size * TOKEN_BYTES
        for i, engine_hash in enumerate(event.block_hashes):
            node = self._nodes.get(engine_hash)
            if node is None:
                node = self._nodes[engine_hash] = _Node(engine_hash, parent)
            elif node.refs:
                self.counters["duplicates"] += 1
            elif node.parent is None and node.own is None and parent is not None and node is not parent:
                parent.adopt(node)
            node.refs += 1
            if node.own is None and node.pending is None:
                node.pending = (event.token_ids[i * width : (i + 1) * width], extras[i] if extras else None)
                self.parked += 1
                self.counters["parked"] += 1
            parent = node

    def _resolve(self, node: _Node, parent: _Node | None, own: BlockHash) -> None:
        """The node's place in a chain is known now, and with it that of everything parked under it."""
        if node.parent is None and parent is not None:
            parent.adopt(node)
        node.own = own
        stack = [node]
        while stack:
            node_now = stack.pop()
            if node_now.pending is not None:
                node_now.pending = None
                self.parked -= 1
                self.counters["attached"] += 1
            for child in node_now.children or ():
                if child.own is None and child.pending is not None and node_now.own is not None:
                    tokens, extra = child.pending
                    child.own = chain(node_now.own, tokens, self.block_size, None if extra is None else [extra])[0]
                    stack.append(child)
        self._publish(node)

    # --- removed ----------------------------------------------------------------------------------------------------

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in _GPU or event.locality == "REMOTE":
            self.counters["skipped_medium"] += len(event.block_hashes)
            self.offloaded.difference_update(event.block_hashes)
            return
        if event.group_idx is not None and self._group is not None and event.group_idx != self._group:
            self.counters["skipped_group"] += len(event.block_hashes)
            return
        for engine_hash in event.block_hashes:
            node = self._nodes.get(engine_hash)
            if node is None or not node.refs:
                self.counters["unknown_removals"] += 1
                continue
            self.counters["removed"] += 1
            node.refs -= 1
            if not node.refs:
                self._withdraw(node)
                self._forget(node)

    def _forget(self, node: _Node) -> None:
        """Drop what is neither held nor needed to place a held descendant."""
        current: _Node | None = node
        while current is not None and not current.refs and not current.children:
            del self._nodes[current.engine_hash]
            if current.pending is not None:
                self.parked -= 1
            above = current.parent
            if above is not None and above.children is not None:
                above.children.discard(current)
            current = above

    def _clear(self, _event: AllBlocksCleared) -> None:
        self.counters["cleared"] += 1
        for own in self._published:
            self._note(own, there=False)
        self._published.clear()
        self._nodes.clear()
        self.offloaded.clear()
        self.parked = 0

    # --- published --------------------------------------------------------------------------------------------------

    def _publish(self, node: _Node) -> None:
        """Publish the node, where its ancestors allow it, and the held descendants that waited for it."""
        if node.published or not node.refs or (node.parent is not None and not node.parent.published):
            return
        published = self._published
        stack = [node]
        while stack:
            node = stack.pop()
            if node.own is None:
                continue
            node.published = True
            copies = published.get(node.own, 0)
            published[node.own] = copies + 1
            if not copies:
                self._note(node.own, there=True)
            if node.children:
                stack.extend(child for child in node.children if child.refs and not child.published)

    def _withdraw(self, node: _Node) -> None:
        if not node.published:
            return
        stack = [node]
        while stack:
            node = stack.pop()
            node.published = False
            assert node.own is not None
            copies = self._published[node.own] - 1
            if copies:
                self._published[node.own] = copies
            else:
                del self._published[node.own]
                self._note(node.own, there=False)
            if node.children:
                stack.extend(child for child in node.children if child.published)

    def _note(self, own: BlockHash, *, there: bool) -> None:
        self.digest ^= int.from_bytes(own[:8])
        if own in self._net:
            del self._net[own]
        else:
            self._net[own] = there
