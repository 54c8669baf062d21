"""The engine's figures in Prometheus' text format, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replicas.emulated.scheduler import FinishReason, Scheduler


class EngineCollector(Collector):
    """Reads a scheduler whenever it is scraped."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler = scheduler
        self._labels = {"engine": "0", "model_name": model}

    def collect(self) -> Iterator[Metric]:
        scheduler, stats = self._scheduler, self._scheduler.stats
        yield self._gauge("num_requests_running", "Requests in the running batch.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", len(scheduler.waiting))
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage; 1 means all of it.", scheduler.pool.usage)
        counters = {
            "prefix_cache_queries": ("Prefix cache queries, in tokens.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prefix cache hits, in tokens.", stats.prefix_cache_hits),
            "prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
            "prompt_tokens_cached": ("Prompt tokens that were cached.", stats.prompt_tokens_cached),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "num_preemptions": ("Preemptions.", stats.num_preemptions),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        yield self._finished()
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def _finished(self) -> Metric:
        labels = [*self._labels, "finished_reason"]
        counter = CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=labels)
        for reason in get_args(FinishReason):
            counter.add_metric([*self._labels.values(), reason], self._scheduler.stats.finished[reason])
        return counter

    def _cache_config(self) -> Metric:
        pool = self._scheduler.pool
        labels = {
            "block_size": str(pool.block_size),
            "enable_prefix_caching": "True",
            "engine": "0",
            # vLLM counts the null block, which can't be used.
            "num_gpu_blocks": str(pool.num_blocks + 1),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration.", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1.0)
        return gauge


def registry(scheduler: Scheduler, model: str) -> CollectorRegistry:
    own = CollectorRegistry()
    own.register(EngineCollector(scheduler, model))
    return own


def render(metrics: CollectorRegistry) -> bytes:
    return generate_latest(metrics)
