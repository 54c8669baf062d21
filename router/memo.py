"""Prefix memo: from a rendered prompt to its block hashes in time proportional to what is new in it.

A text is cut before special tokens into pieces (see `router.cuts`). Each prefix of pieces has a key, chained like block
hashes; the deepest key that is known leads to a node with the state of the hash chain there:

    piece 1 ------ piece 2 ------ piece 3 ------ piece 4 (new)
     node <-parent- node <-parent- node           tokenise, hash the full blocks, add a node

Nodes form a tree: what chats share is kept once. The least recently used keys are dropped beyond `max_bytes`.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from os.path import commonprefix
from threading import Lock

from xxhash import xxh3_128_digest

from router.hashing import HASH_BYTES, TOKEN_BYTES, HashChain, chain
from router.types import BlockHash

_MIN_PIECE = 64
"""Characters below which a piece goes on past a cut: pieces of a few characters would cost more than they save."""
_NODE_BYTES = 400
"""What a node costs beside its hashes: key, dictionary entry and object."""


class _Node:
    """State after a prefix. `hashes`: of the blocks that became full within this piece; `tail`: ids of the unfinished
    block, as bytes; `ids`: the piece's own, where they are kept."""

    __slots__ = ("blocks", "hashes", "ids", "parent", "tail", "tokens")

    def __init__(self, parent: _Node | None, hashes: bytes, tail: bytes, tokens: int, ids: bytes) -> None:
        self.ids = ids
        self.parent = parent
        self.hashes = hashes
        self.tail = tail
        self.tokens = tokens
        self.blocks: int = (parent.blocks if parent else 0) + len(hashes) // HASH_BYTES

    def last_hash(self) -> bytes:
        node: _Node | None = self
        while node is not None:
            if node.hashes:
                return node.hashes[-HASH_BYTES:]
            node = node.parent
        return b""

    def chain(self) -> HashChain:
        return HashChain(b"".join(node.hashes for node in reversed(list(self._path()))))

    def all_ids(self) -> bytes:
        return b"".join(node.ids for node in reversed(list(self._path())))

    def _path(self) -> Iterator[_Node]:
        node: _Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixMemo:
    """`encode` gives a piece's ids as little-endian uint32 bytes. Safe to use from several threads.

    `keep_ids`: ids can be asked for as well. Keys are cryptographic then: ids that are sent to an engine decide what it
    answers, so that nobody may be able to make a text whose key is another one's.
    """

    def __init__(
        self,
        encode: Callable[[str], bytes],
        cuts: Sequence[str],
        max_bytes: int = 64 * 2**20,
        *,
        keep_ids: bool = False,
    ) -> None:
        self.keep_ids = keep_ids
        self._digest: Callable[[bytes], bytes] = _strong_digest if keep_ids else xxh3_128_digest
        self._encode = encode
        self._cut = re.compile("|".join(re.escape(cut) for cut in sorted(cuts, key=len, reverse=True)))
        self._cuts_begin = commonprefix(list(cuts))  # noqa: RUF071  # characters, no paths
        self._max_bytes = max_bytes
        self._nodes: OrderedDict[bytes, _Node] = OrderedDict()
        self._lock = Lock()
        self.bytes = 0
        self.hits = 0  # pieces found
        self.misses = 0  # pieces tokenised

    def __len__(self) -> int:
        return len(self._nodes)

    def chain(self, root: BlockHash, text: str, block_size: int) -> tuple[int, HashChain]:
        """Number of tokens and the hashes of the full blocks of `text` under `root`."""
        node = self._reach(root, text, block_size)
        return (node.tokens, node.chain()) if node is not None else (0, HashChain(b""))

    def chain_and_ids(self, root: BlockHash, text: str, block_size: int) -> tuple[int, HashChain, bytes]:
        """The same, and the ids as little-endian uint32 bytes; empty unless `keep_ids`."""
        node = self._reach(root, text, block_size)
        return (node.tokens, node.chain(), node.all_ids()) if node is not None else (0, HashChain(b""), b"")

    def _reach(self, root: BlockHash, text: str, block_size: int) -> _Node | None:
        """The node of the whole text, made where it wasn't there."""
        pieces, digest = self.split(text), self._digest
        key = digest(root + block_size.to_bytes(4, "little"))
        keys = [key := digest(key + digest(_bytes(piece))) for piece in pieces]
        known, node = self._deepest(keys)
        self.hits += known
        self.misses += len(pieces) - known
        for key, piece in zip(keys[known:], pieces[known:], strict=True):
            node = self._extend(node, root, piece, block_size)
            self._keep(key, node)
        self._touch(keys)
        return node

    def split(self, text: str) -> list[str]:
        """Cut before special tokens, but not into pieces below `_MIN_PIECE` characters. A longer text that begins with
        this one has the same pieces, up to the last one."""
        pieces, start, begin, search = [], 0, self._cuts_begin, self._cut.search
        # Most of a text can't be a cut: `find` skips it at several times the speed of the pattern.
        while (at := text.find(begin, start + _MIN_PIECE)) >= 0 and (match := search(text, at)):
            pieces.append(text[start : match.start()])
            start = match.start()
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def last_cut(self, text: str, end: int) -> int:
        """The last place at or before `end` where `text` may be cut; 0 where there is none."""
        return max((match.start() for match in self._cut.finditer(text, 0, end)), default=0)

    def _deepest(self, keys: Sequence[bytes]) -> tuple[int, _Node | None]:
        with self._lock:
            for known in range(len(keys), 0, -1):
                node = self._nodes.get(keys[known - 1])
                if node is not None:
                    return known, node
        return 0, None

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Longer prefixes first: so a node is dropped before what it hangs on, and no dropped node is kept alive."""
        with self._lock:
            for key in reversed(keys):
                if key in self._nodes:
                    self._nodes.move_to_end(key)
            while self.bytes > self._max_bytes and self._nodes:
                _, dropped = self._nodes.popitem(last=False)
                self.bytes -= _size(dropped)

    def _extend(self, node: _Node | None, root: BlockHash, piece: str, block_size: int) -> _Node:
        ids = self._encode(piece)
        data = node.tail + ids if node is not None else ids
        parent = BlockHash((node.last_hash() if node is not None else b"") or root)
        hashes = b"".join(chain(parent, data, block_size))
        width = block_size * TOKEN_BYTES
        tokens = (node.tokens if node is not None else 0) + len(ids) // TOKEN_BYTES
        tail = data[len(data) // width * width :]
        return _Node(node, hashes, tail, tokens, ids if self.keep_ids else b"")

    def _keep(self, key: bytes, node: _Node) -> None:
        with self._lock:
            if key in self._nodes:
                return
            self._nodes[key] = node
            self.bytes += _size(node)


def _size(node: _Node) -> int:
    return _NODE_BYTES + len(node.hashes) + len(node.tail) + len(node.ids)


def _strong_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES * 2).digest()


def _bytes(piece: str) -> bytes:
    """For keys only. Lone surrogates stay apart from everything else; the tokenizer is the one to refuse them."""
    return piece.encode("utf-8", "surrogatepass")
