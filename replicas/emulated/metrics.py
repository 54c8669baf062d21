"""The engine's figures in Prometheus' text format: vLLM's under vLLM's names, our own as `whohas_emulated_...`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from replicas.emulated.engine import Engine
from replicas.emulated.figures import WINDOW_S
from replicas.emulated.scheduler import FinishReason


class EngineCollector(Collector):
    """Reads an engine whenever it is scraped."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._labels = {"engine": "0", "model_name": model}

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield self._finished()
        yield from self._histograms()
        yield self._sleep_state()
        yield self._cache_config()

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self._scheduler
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", len(scheduler.waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage; 1 means all of it.", scheduler.pool.usage)
        rates = self._engine.figures.rates(self._engine.now())
        for name, value in rates.items():
            text = f"{name.replace('_', ' ').capitalize()}, over the last {WINDOW_S:g} simulated seconds."
            yield self._gauge(f"whohas_emulated_{name}", text, value)
        cached = len(scheduler.pool.cached_hashes)
        yield self._gauge("whohas_emulated_cached_blocks", "Different blocks that can be hit.", cached)
        yield self._gauge("whohas_emulated_kv_usage", "Share of the blocks that requests hold.", scheduler.pool.usage)

    def _counters(self) -> Iterator[Metric]:
        stats, figures = self._scheduler.stats, self._engine.figures
        counters = {
            "vllm:prefix_cache_queries": ("Prefix cache queries, in tokens.", stats.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prefix cache hits, in tokens.", stats.prefix_cache_hits),
            "vllm:prompt_tokens": ("Prompt tokens processed.", stats.prompt_tokens),
            "vllm:prompt_tokens_cached": ("Prompt tokens that were cached.", stats.prompt_tokens_cached),
            "vllm:generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "vllm:num_preemptions": ("Preemptions.", stats.num_preemptions),
            "whohas_emulated_busy_seconds": ("Simulated seconds in which a step ran.", figures.busy_s),
            "whohas_emulated_prefill_seconds": ("What of those prefill took.", figures.prefill_s),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        figures = self._engine.figures
        histograms = {
            "vllm:time_to_first_token_seconds": ("Time to first token.", figures.ttft_s),
            "vllm:inter_token_latency_seconds": ("Time between two tokens.", figures.itl_s),
            "vllm:request_time_per_output_token_seconds": ("Mean time between tokens of a request.", figures.tpot_s),
            "vllm:e2e_request_latency_seconds": ("Time from arrival to the last token.", figures.e2e_s),
            "vllm:iteration_tokens_total": ("Tokens of a step.", figures.step_tokens),
            "vllm:request_prompt_tokens": ("Prompt tokens of a request.", figures.prompt_tokens),
            "vllm:request_generation_tokens": ("Tokens generated for a request.", figures.generation_tokens),
            "whohas_emulated_step_lag_seconds": ("How late a step ended, by the wall clock.", figures.lag_s),
        }
        for name, (text, values) in histograms.items():
            histogram = HistogramMetricFamily(name, text, labels=list(self._labels))
            histogram.add_metric(list(self._labels.values()), values.buckets(), values.sum)
            yield histogram

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge

    def _finished(self) -> Metric:
        labels = [*self._labels, "finished_reason"]
        counter = CounterMetricFamily("vllm:request_success", "Requests that ended.", labels=labels)
        for reason in get_args(FinishReason):
            counter.add_metric([*self._labels.values(), reason], self._scheduler.stats.finished[reason])
        return counter

    def _sleep_state(self) -> Metric:
        level = self._engine.sleep_level
        states = {"awake": level is None, "weights_offloaded": level == 1, "discard_all": level == 2}
        labels = [*self._labels, "sleep_state"]
        gauge = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the state that it is in.", labels=labels)
        for state, here in states.items():
            gauge.add_metric([*self._labels.values(), state], float(here))
        return gauge

    def _cache_config(self) -> Metric:
        pool = self._scheduler.pool
        labels = {
            "block_size": str(pool.block_size),
            "enable_prefix_caching": str(self._scheduler.config.enable_prefix_caching),
            "engine": "0",
            # vLLM counts the null block, which can't be used.
            "num_gpu_blocks": str(pool.num_blocks + 1),
        }
        gauge = GaugeMetricFamily("vllm:cache_config_info", "The cache's configuration.", labels=list(labels))
        gauge.add_metric(list(labels.values()), 1.0)
        return gauge


def registry(engine: Engine, model: str) -> CollectorRegistry:
    own = CollectorRegistry()
    own.register(EngineCollector(engine, model))
    return own


def render(metrics: CollectorRegistry) -> bytes:
    return generate_latest(metrics)
