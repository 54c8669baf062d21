"""Settings of one emulated server, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.emulated.faults import Faults
from replicas.emulated.models import parse_module
from replicas.emulated.scheduler import SchedulerConfig
from replicas.emulated.step_time import DEFAULT_PROFILE, load_profile


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Raises ValueError naming the field.

    `tokenizer` is a folder (or what else the router's encoder loads); empty means `model`. `num_blocks` counts usable
    blocks. `profile` is as `load_profile` takes it, `event_delay_s` in wall-clock seconds. `lora_modules`: NAME,
    NAME=PATH or a JSON object each. Without a `hash_seed` block hashes differ from one start to the next, as vLLM's do.
    `faults` and `allow_faults`: see replicas/emulated/faults.py.
    """

    model: str
    tokenizer: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    block_size: int = 16
    num_blocks: int = 20_000
    max_model_len: int = 32_768
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    profile: str = DEFAULT_PROFILE
    speed: float = 1.0
    kv_events_endpoint: str | None = None
    kv_replay_endpoint: str | None = None
    kv_events_topic: str = "kv-events"
    event_delay_s: float = 0.0
    lora_modules: tuple[str, ...] = ()
    hash_seed: int | None = None
    faults: Faults = field(default_factory=Faults)
    allow_faults: bool = False

    def __post_init__(self) -> None:
        load_profile(self.profile)
        for name in ("block_size", "num_blocks", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self.scheduler, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self.scheduler, name)}")
        if not self.speed > 0:
            raise ValueError(f"speed must be above 0, not {self.speed}")
        if not self.event_delay_s >= 0:
            raise ValueError(f"event_delay must be at least 0, not {self.event_delay_s}")
        if self.kv_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_replay_endpoint needs kv_events_endpoint")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than num_blocks * block_size = "
                f"{self.num_blocks * self.block_size} tokens; raise num_blocks or lower max_model_len"
            )
        names = self.adapters
        if self.model in names or len(set(names)) < len(names):
            raise ValueError("lora_modules must be names that differ from each other and from the model")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that are served from the start."""
        return tuple(parse_module(module)[0] for module in self.lora_modules)
