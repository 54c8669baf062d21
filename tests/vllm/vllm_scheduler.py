"""vLLM's own Scheduler and KVCacheManager with no model, no weights and no worker."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.operations import LORAS, Add, Setup
from tests.vllm.subjects import Event, Scheduled, plain

MAX_MODEL_LEN = 32_768
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 128,
    "torch_dtype": "float32",
}


@functools.cache
def model_config() -> ModelConfig:
    """Of a model that exists as a config.json only."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        return ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
        )


class _Events:
    """Stands where vLLM has its ZMQ publisher."""

    def __init__(self) -> None:
        self.taken: list[Event] = []

    def publish(self, batch: Any) -> None:
        self.taken += [plain(event) for event in batch.events]


class VllmSubject:
    def __init__(self, setup: Setup) -> None:
        config = _config(setup)
        spec = FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        num_blocks = setup.num_blocks + 1  # one is the null block
        config.cache_config.num_gpu_blocks = num_blocks
        self._scheduler = Scheduler(
            config,
            KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]),
            StructuredOutputManager(config),
            block_size=setup.block_size,
            log_stats=True,
        )
        self._events = _Events()
        self._scheduler.kv_event_publisher = self._events
        init_none_hash(sha256_cbor)
        hasher = get_request_block_hasher(setup.block_size, sha256_cbor)
        self._hasher = hasher if setup.enable_prefix_caching else None
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._step: SchedulerOutput | None = None
        self._queries = self._hits = self._preemptions = 0
        self.first_tokens: dict[str, int | None] = {}

    def add(self, add: Add) -> None:
        self._outputs[add.name] = add.output
        sampling = SamplingParams(
            max_tokens=len(add.output),
            ignore_eos=True,
            skip_reading_prefix_cache=not add.reuse_cache,
            extra_args={"kv_cache_report_mode": "full"} if add.report_hits else None,
        )
        request = Request(
            add.name,
            list(add.prompt),
            sampling,
            None,
            arrival_time=add.arrival,
            lora_request=None if add.lora is None else LoRARequest(add.lora, LORAS[add.lora], f"loras/{add.lora}"),
            cache_salt=add.salt,
            priority=add.priority,
            block_hasher=self._hasher,
            session_id=add.session_id,
        )
        self._scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, preempt_running: bool) -> bool:
        if preempt_running:
            self._preemptions += len(self._scheduler.running)
        return bool(self._scheduler.reset_prefix_cache(reset_running_requests=preempt_running))

    def begin(self) -> Scheduled:
        while True:
            before = self._counted_preemptions()
            self._step = self._scheduler.schedule()
            preempted = self._counted_preemptions() - before
            self._preemptions += preempted
            if self._step.num_scheduled_tokens or not preempted:
                return list(self._step.num_scheduled_tokens.items())
            # By priority the first in line can be its own victim: an empty step, and vLLM's loop goes round once more.
            self._run(self._step)

    def end(self) -> list[Event]:
        assert self._step is not None
        self._run(self._step)
        self._step = None
        events, self._events.taken = self._events.taken, []
        return events

    def state(self, *, in_step: bool) -> dict[str, Any]:
        scheduler = self._scheduler
        waiting = [*scheduler.kv_holding_waiting, *scheduler.waiting]
        known = scheduler.running
        manager = scheduler.kv_cache_manager
        return {
            "running": [one.request_id for one in scheduler.running],
            "waiting": [one.request_id for one in waiting],
            "blocks": {
                one.request_id: [block - 1 for block in manager.get_block_ids(one.request_id)[0]] for one in known
            },
            "tokens": {one.request_id: one.num_tokens for one in known},
            "preemptions": {one.request_id: one.num_preemptions for one in known},
            "computed": {} if in_step else {one.request_id: one.num_computed_tokens for one in known},
            "cached tokens at the first token": self.first_tokens,
            "usage": round(manager.usage, 9),
            "hits": None if in_step else (self._queries, self._hits),
            "preemptions in all": self._preemptions,
        }

    def free_queue(self) -> list[int]:
        return [
            block.block_id - 1
            for block in self._scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        ]

    def _counted_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self._scheduler.requests.values())

    def _run(self, step: SchedulerOutput) -> None:
        """What a worker would answer: a token for each request whose last known token is in the step."""
        names = list(step.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self._scheduler.requests.get(name)
            done = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([self._outputs[name][request.num_output_tokens]] if request is not None and done else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        for answer in self._scheduler.update_from_output(step, output).values():
            for one in answer.outputs:
                if one.prefill_stats is not None:
                    self.first_tokens[one.request_id] = one.prefill_stats.num_cached_tokens
            stats = answer.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                self._queries += stats.prefix_cache_stats.queries
                self._hits += stats.prefix_cache_stats.hits


@functools.lru_cache(maxsize=64)
def _config(setup: Setup) -> VllmConfig:
    scheduler = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=max(setup.max_num_batched_tokens, setup.max_num_seqs),
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=setup.policy,
    )
    config = VllmConfig(
        model_config=model_config(),
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=setup.block_size, enable_prefix_caching=setup.enable_prefix_caching),
        scheduler_config=scheduler,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    assert config.scheduler_config.max_num_batched_tokens >= setup.max_num_batched_tokens
    return config
