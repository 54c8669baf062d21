"""KV events on the wire: the payload of one ZMQ message -> `KVEventBatch`.

vLLM's payload is msgpack, `[ts, [event, ...], dp_rank]`. An event is a map tagged `type`; before mid-2026 it was an
array, tag first and fields in a fixed order. Both are accepted, also mixed. Format: vllm/distributed/kv_events.py.
What this decoder doesn't know is left out and counted; only a payload without that outer shape is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import error as StructError
from typing import Any

import msgspec

from router.hashing import pack_token_ids

EngineBlockHash = int | bytes
"""The engine's own name of a block: unsigned 64-bit, or the digest, as the engine is set up."""

_UNSIGNED_64 = (1 << 64) - 1
_MAX_TAG_CHARS = 64


class DecodeError(ValueError):
    """The payload is no batch of KV events."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one chain entered the cache, the first one a child of `parent_block_hash` (None: a root).

    `token_ids`: little-endian uint32, `block_size` of them a block. `extra_keys`: what else went into each block's
    hash, untagged: the adapter's name, (media hash, offset) pairs, the cache salt (in the first block of a chain).
    """

    block_hashes: Sequence[EngineBlockHash]
    parent_block_hash: EngineBlockHash | None
    token_ids: bytes
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = field(default=None, repr=False)
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of each of these blocks left the cache."""

    block_hashes: Sequence[EngineBlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine dropped its whole prefix cache."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """What one engine step did to the cache, in order. `ts`: the engine's Unix time, s.

    `ignored` counts unknown tags (`Tag`) and unknown fields (`Tag.field`), `broken` events that had a known tag but
    not its shape; the key "?" stands for events without a tag.
    """

    ts: float
    events: Sequence[KVEvent]
    dp_rank: int | None = None
    ignored: Mapping[str, int] = field(default_factory=dict)
    broken: Mapping[str, int] = field(default_factory=dict)


# Order of an array-encoded event's fields, after the tag.
_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        "lookahead_token_ids",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
_KNOWN = {tag: frozenset((*names, "type")) for tag, names in _FIELDS.items()}


def decode_batch(payload: bytes) -> KVEventBatch:
    """Raises `DecodeError` where the payload has no list of events; a broken event costs only itself."""
    ts, raw_events, dp_rank = _outer(payload)
    events: list[KVEvent] = []
    ignored: dict[str, int] = {}
    broken: dict[str, int] = {}
    for raw in raw_events:
        tag, fields = _fields(raw, ignored)
        build = _BUILDERS.get(tag)
        if build is None or fields is None:
            target = ignored if build is None and tag != "?" else broken
            target[tag] = target.get(tag, 0) + 1
            continue
        try:
            events.append(build(fields))
        except (KeyError, TypeError, ValueError, StructError):
            broken[tag] = broken.get(tag, 0) + 1
    return KVEventBatch(ts, events, dp_rank, ignored, broken)


def _outer(payload: bytes) -> tuple[float, Sequence[Any], int | None]:
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        batch = _decode_one_by_one(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise DecodeError("not [ts, [event, ...], ...]")
    ts = batch[0] if isinstance(batch[0], int | float) else 0.0
    rank = batch[2] if len(batch) > 2 and isinstance(batch[2], int) else None
    return float(ts), batch[1], rank


def _decode_one_by_one(payload: bytes) -> list[Any]:
    """The slow way, for a batch with an event that isn't valid by itself (it becomes None)."""
    try:
        outer = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
        raws = msgspec.msgpack.decode(outer[1], type=list[msgspec.Raw])
        head = [msgspec.msgpack.decode(outer[0])]
        tail = [msgspec.msgpack.decode(raw) for raw in outer[2:]]
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, IndexError) as error:
        raise DecodeError(f"no msgpack batch of {len(payload)} bytes: {error}") from error
    events: list[Any] = []
    for raw in raws:
        try:
            events.append(msgspec.msgpack.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            events.append(None)
    return [*head, events, *tail]


def _fields(raw: Any, ignored: dict[str, int]) -> tuple[str, dict[str, Any] | None]:
    """Tag and named fields; `None` for fields where the event has no known shape."""
    if isinstance(raw, dict):
        tag = raw.get("type")
    elif isinstance(raw, list) and raw:
        tag = raw[0]
    else:
        return "?", None
    if not isinstance(tag, str):
        return "?", None
    names = _FIELDS.get(tag)
    if names is None:
        return tag[:_MAX_TAG_CHARS], None
    if isinstance(raw, list):
        if len(raw) > len(names) + 1:
            _count_unknown(ignored, tag, range(len(names), len(raw) - 1))
        return tag, dict(zip(names, raw[1:], strict=False))
    if not raw.keys() <= _KNOWN[tag]:
        _count_unknown(ignored, tag, raw.keys() - _KNOWN[tag])
    return tag, raw


def _count_unknown(ignored: dict[str, int], tag: str, names: Any) -> None:
    for name in names:
        key = f"{tag}.{str(name)[:_MAX_TAG_CHARS]}"
        ignored[key] = ignored.get(key, 0) + 1


def _stored(fields: dict[str, Any]) -> BlockStored:
    block_size = fields["block_size"]
    extra_keys = fields.get("extra_keys")
    if type(block_size) is not int or not (extra_keys is None or isinstance(extra_keys, list)):
        raise TypeError
    parent = fields["parent_block_hash"]
    return BlockStored(
        block_hashes=_hashes(fields["block_hashes"]),
        parent_block_hash=None if parent is None else _hashes([parent])[0],
        token_ids=pack_token_ids(fields["token_ids"]),
        block_size=block_size,
        lora_id=fields.get("lora_id"),
        medium=fields.get("medium"),
        lora_name=fields.get("lora_name"),
        extra_keys=extra_keys,
        group_idx=fields.get("group_idx"),
        kv_cache_spec_kind=fields.get("kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=fields.get("kv_cache_spec_sliding_window"),
        locality=fields.get("locality"),
    )


def _removed(fields: dict[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        _hashes(fields["block_hashes"]), fields.get("medium"), fields.get("group_idx"), fields.get("locality")
    )


def _cleared(_fields: dict[str, Any]) -> AllBlocksCleared:
    return AllBlocksCleared()


def _hashes(raw: Any) -> list[EngineBlockHash]:
    """Some engines sent the same 64 bits as a signed number: made unsigned, so that one block has one name."""
    if not isinstance(raw, list):
        raise TypeError
    kinds = set(map(type, raw))
    if not kinds <= {int, bytes}:
        raise TypeError
    if int in kinds and any(type(value) is int and value < 0 for value in raw):
        return [value & _UNSIGNED_64 if type(value) is int else value for value in raw]
    return raw


_BUILDERS: dict[str, Callable[[dict[str, Any]], KVEvent]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}
