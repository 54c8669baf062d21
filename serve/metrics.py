"""Prometheus metrics of one ingress process, and the sum over all of them behind one `/metrics`.

A scrape reaches any of the ingress processes, so each leaves its figures in Redis every few seconds and answers with
everybody's, told apart by the label `ingress`. While Redis is away a process answers with its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from redis.exceptions import RedisError

from router.asked import Asked
from router.ownership import Snapshot
from router.ownership.client import make_raw_client
from router.tasks import end
from router.types import Decision

EXPOSITION = b"text/plain; version=0.0.4; charset=utf-8"
"""Content type of what Prometheus reads."""

_PERIOD_S = 2.0
_COUNTS_S = 10.0
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_LONG_TOKENS = 1024
_SHARED = (0, 64, 256, 1024, 4096, 16384, 65536)
_ERRORS = (-16384, -4096, -1024, -256, -64, -1, 0, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class FleetState:
    """What the gauges tell of one fleet; `left_out`: replicas that get nothing because they failed."""

    snapshot: Snapshot
    trust: Mapping[str, float]
    degraded: bool
    left_out: int


class Metrics:
    """The figures of this process. Names start with `whohas_`; times are in seconds, sizes in tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("whohas_requests", "Requests answered", ["status"], registry=r)
        self.retries = Counter("whohas_retries", "Requests sent to a second replica", registry=r)
        self.in_flight = Gauge("whohas_in_flight", "Requests being answered", registry=r)
        self.decision = Histogram(
            "whohas_decision_seconds", "Body to decision, look-up included", buckets=_SECONDS, registry=r
        )
        self.first_byte = Histogram(
            "whohas_time_to_first_byte_seconds", "Request to first byte of the answer", buckets=_SECONDS, registry=r
        )
        self.prompt_tokens = Counter("whohas_prompt_tokens", "Prompt tokens routed", registry=r)
        self.predicted = Counter("whohas_predicted_cached_tokens", "Cached tokens promised", registry=r)
        self.reported = Counter("whohas_reported_cached_tokens", "Cached tokens reported by engines", registry=r)
        self.predictions = Counter(
            "whohas_predictions",
            "Answers that tell cached tokens, by how the promise held",
            ["replica", "outcome"],
            registry=r,
        )
        self.shared = Histogram(
            "whohas_long_prompt_shared_tokens",
            "Of a prompt of 1,024 tokens or more, how many of the first ones some replica had. Mostly next to none: "
            "something at the head of the prompts, a date or an id, differs each time",
            buckets=_SHARED,
            registry=r,
        )
        self.error = Histogram(
            "whohas_prediction_error_tokens", "Promised less reported cached tokens", buckets=_ERRORS, registry=r
        )
        self.by_load = Counter("whohas_routed_by_load", "Decisions without look-up, by reason", ["reason"], registry=r)
        self.degraded = Gauge("whohas_ownership_map_unavailable", "1 while routing by load alone", registry=r)
        self.replicas = Gauge("whohas_replicas", "Replicas in the ownership map", registry=r)
        self.trust = Gauge("whohas_replica_trust", "Share of promises kept, lately", ["replica"], registry=r)
        self.doubts = Gauge("whohas_replica_doubt", "1: found not to conform; no credit", ["replica"], registry=r)
        self.left_out = Gauge("whohas_replicas_left_out", "Replicas without requests because they failed", registry=r)
        self.blocks = Gauge("whohas_replica_blocks", "KV blocks owned", ["replica"], registry=r)
        self.unwritten = Gauge(
            "whohas_replica_unwritten_blocks",
            "KV blocks that the map is yet to be told of",
            ["replica"],
            registry=r,
        )
        self.unused = Gauge(
            "whohas_replica_unused_kv_events",
            "What an engine's KV events told that could not be used, since its start",
            ["replica", "reason"],
            registry=r,
        )

    def decided(self, decision: Decision, asked: Asked, seconds: float) -> None:
        """`seconds` since the request arrived."""
        self.decision.observe(seconds)
        if asked.num_tokens >= _LONG_TOKENS and asked.reusable and not asked.note:
            shared = max(one.view.overlap_blocks for one in decision.candidates)
            self.shared.observe(shared * asked.block_size)
        self.prompt_tokens.inc(decision.prompt_tokens)
        self.predicted.inc(decision.predicted_cached_tokens)

    def observe_prediction(self, replica: str, predicted: int, reported: int) -> None:
        self.reported.inc(reported)
        outcome = "exact" if predicted == reported else "too_high" if predicted > reported else "too_low"
        self.predictions.labels(replica, outcome).inc()
        self.error.observe(predicted - reported)

    def observe_fleets(self, fleets: Iterable[FleetState]) -> None:
        """All gauges of replicas anew."""
        states = list(fleets)
        self.degraded.set(any(one.degraded for one in states))
        self.left_out.set(sum(one.left_out for one in states))
        self.replicas.set(sum(len(one.snapshot.replicas) for one in states))
        for gauge in (self.blocks, self.unwritten, self.trust, self.doubts, self.unused):
            gauge.clear()
        for one in states:
            for record in one.snapshot.replicas.values():
                self.blocks.labels(record.replica_id).set(record.blocks)
                self.unwritten.labels(record.replica_id).set(record.pending)
                self.trust.labels(record.replica_id).set(one.trust.get(record.replica_id, 1.0))
                self.doubts.labels(record.replica_id).set(bool(record.doubt))
                for reason, count in record.unused.items():
                    self.unused.labels(record.replica_id, reason).set(count)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


class SharedMetrics:
    """Everybody's figures through one hash in Redis, `key`; `name` is this process's own field.

    A field holds the Unix time until which it counts, and the exposition.
    """

    def __init__(self, metrics: Metrics, redis_url: str, key: str, name: str, timeout_s: float = 1.0) -> None:
        self._metrics = metrics
        self._key = key
        self._name = name
        self._timeout_s = timeout_s
        self._redis = make_raw_client(redis_url, timeout_s)
        self._publisher: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._publisher = asyncio.create_task(self._publish(), name="whohas-metrics")

    async def close(self) -> None:
        await end(self._publisher)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._redis.hdel(self._key, self._name)
        await self._redis.aclose()

    async def text(self) -> bytes:
        """The exposition of all ingress processes. Whatever one scrape saw of a process, no later one sees less, even
        where another process answers it: counters that went back would look like restarts."""
        texts = {self._name: self._metrics.text()}
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self._tell(texts[self._name])
                texts |= await self._others()
        registry = CollectorRegistry()
        registry.register(_Merged(texts.items()))
        return generate_latest(registry)

    async def _others(self) -> dict[str, str]:
        told: dict[bytes, bytes] = await self._redis.hgetall(self._key)  # type: ignore[assignment]
        texts, gone = {}, []
        for name, value in told.items():
            until, _, text = value.partition(b"\n")
            if float(until) < time.time():
                gone.append(name)
            elif name.decode() != self._name:
                texts[name.decode()] = text.decode()
        if gone:
            await self._redis.hdel(self._key, *gone)
        return texts

    async def _tell(self, text: str) -> None:
        await self._redis.hset(self._key, self._name, f"{time.time() + _COUNTS_S}\n{text}")

    async def _publish(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await self._tell(self._metrics.text())
            await asyncio.sleep(_PERIOD_S)


class _Merged:
    """Collector over several expositions, each sample with the label `ingress`."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._texts = list(texts)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, text in self._texts:
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "ingress": name}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()
