"""Settings of a replica's engine, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("emulated", "vllm", "external")
DEVICES = ("auto", "cuda", "cpu")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Raises ValueError naming the field. What is None is left to the engine's own default.

    `kind`: one of `KINDS`, or `package.module:Class` of something that makes an `Engine`.
    `model`: what the engine loads; `served_model_name`: what clients call it, where that differs. `num_blocks`,
    `profile`, `speed` (simulated seconds per second) and `event_delay_s` are for `emulated`; `tensor_parallel_size`
    and `gpu_memory_utilization` for `vllm`; `command` starts another `vllm` than the one beside this Python. `args`:
    further flags of the engine's own command line; they win over the fields here. `device`: where a `vllm` engine
    computes, one of `DEVICES`; auto is what the installed build of vLLM is for. `cpus`: cores for one that computes
    on the CPU, all its workers together.
    `endpoints`: base URLs of `external` engines, one a replica, with their ZMQ `events_endpoints` and
    `replay_endpoints` in the same order (or none at all: then there is no credit for their blocks).
    `data_parallel_size`: ranks behind each URL, each one a replica; the ZMQ endpoints are then those of rank 0.
    """

    kind: str = "emulated"
    model: str = ""
    served_model_name: str = ""
    tokenizer: str = ""
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    profile: str = ""
    speed: float = 1.0
    event_delay_s: float = 0.0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    device: str = "auto"
    cpus: int | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    start_timeout_s: float = 1800.0
    stop_grace_s: float = 10.0
    endpoints: tuple[str, ...] = ()
    events_endpoints: tuple[str, ...] = ()
    replay_endpoints: tuple[str, ...] = ()
    data_parallel_size: int = 1

    @property
    def num_external(self) -> int:
        """Replicas that `endpoints` stand for: one for each data-parallel rank of each server."""
        return len(self.endpoints) * self.data_parallel_size

    @property
    def name(self) -> str:
        """What clients call the model, and under which its blocks are hashed."""
        return self.served_model_name or self.model

    def __post_init__(self) -> None:
        if self.kind not in KINDS and ":" not in self.kind:
            raise ValueError(f"kind must be one of {', '.join(KINDS)} or package.module:Class, not {self.kind!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        for name in ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "cpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.data_parallel_size > 1 and self.kind != "external":
            raise ValueError("data_parallel_size is for external engines; use more replicas instead")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        for name in ("speed", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("event_delay_s", "stop_grace_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        self._check_endpoints()

    def _check_endpoints(self) -> None:
        if self.kind == "external" and not self.endpoints:
            raise ValueError("endpoints must name at least one URL for an external engine")
        for url in self.endpoints:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"endpoints must be http(s) URLs, not {url!r}")
        for name in ("events_endpoints", "replay_endpoints"):
            given = getattr(self, name)
            if given and len(given) != len(self.endpoints):
                raise ValueError(f"{name} has {len(given)} entries for {len(self.endpoints)} endpoints")
            if len(set(given)) != len(given):
                raise ValueError(f"{name} names one endpoint twice: every replica needs its own engine's")
        if self.replay_endpoints and not self.events_endpoints:
            raise ValueError("replay_endpoints needs events_endpoints")
