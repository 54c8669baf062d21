"""The `args` of the Serve config file. Wrong or unknown fields are named at start."""

from __future__ import annotations

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

from replicas.config import EngineConfig
from router.config import RouterConfig
from router.ownership.client import SCHEMES

DEFAULT_REDIS = "redis://127.0.0.1:6379/0"


class AutoscalingSection(BaseModel):
    """Bounds and aim of the replica count; delays as in Ray Serve, in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=4, ge=1)
    target_ongoing_requests: float = Field(default=16.0, gt=0)
    upscale_delay_s: float = Field(default=30.0, ge=0)
    downscale_delay_s: float = Field(default=600.0, ge=0)
    metrics_interval_s: float = Field(default=5.0, gt=0)
    look_back_period_s: float = Field(default=15.0, gt=0)


class IngressSection(BaseModel):
    """The HTTP front, one process a replica.

    Larger bodies than `max_body_bytes` get a 413, larger heads than `max_header_bytes` a 431. `connect_timeout_s` is
    for engines and their /health; `no_replica_timeout_s`: how long a request waits while none is ready.
    `idle_timeout_s`: a request's body, or more of an answer that has begun, must be there within it; before its first
    byte an engine may think until `total_timeout_s`, which bounds everything. `resend`: a request that an engine took
    and failed before it answered goes to another one, once; without it, only what no engine has seen does.
    `access_log`: Ray Serve's, a line a request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: int = Field(default=2, ge=1)
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    max_header_bytes: int = Field(default=2**16, ge=1024)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    no_replica_timeout_s: float = Field(default=30.0, gt=0)
    idle_timeout_s: float = Field(default=300.0, gt=0)
    total_timeout_s: float = Field(default=3600.0, gt=0)
    resend: bool = True
    access_log: bool = False


class AppConfig(BaseModel):
    """One application: one model, one fleet.

    `model` is what clients call it, and, unless `engine.model` says otherwise, what the engines load. `tokenizer`: a
    directory, a Hugging Face id, or "builtin"; empty means that of what is loaded. `fleet` names what shares
    the ownership map; empty means the model's name. `replicas` is a fixed number unless `autoscaling` is given.
    `drain_s`: how long a stopping replica may finish what it runs. `also`: further models behind the same front, each
    with a fleet of its own; they share this one's `redis` and `ingress`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    tokenizer: str = ""
    adapters: tuple[str, ...] = ()
    engine: EngineConfig = EngineConfig()
    redis: str = Field(DEFAULT_REDIS, pattern=SCHEMES)
    fleet: str = ""
    replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSection | None = None
    router: RouterConfig = RouterConfig()
    ingress: IngressSection = IngressSection()
    drain_s: float = Field(default=120.0, ge=0)
    also: tuple[AppConfig, ...] = ()

    @property
    def all_models(self) -> list[AppConfig]:
        """This one and `also`, each complete."""
        shared = {"redis": self.redis, "ingress": self.ingress}
        return [self, *(one.model_copy(update=shared) for one in self.also)]

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it: the model and its adapters."""
        return (self.model, *self.adapters)

    @property
    def fleet_name(self) -> str:
        return self.fleet or self.model

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's settings with what the whole application shares filled in."""
        loaded = self.engine.model or self.model
        served = "" if loaded == self.model else self.model
        return replace(self.engine, model=loaded, served_model_name=served, tokenizer=self.tokenizer)

    @property
    def tokenizer_source(self) -> str:
        """Where the router finds tokenizer and chat template: the engine's own files unless `tokenizer` is given."""
        return self.tokenizer or self.engine.model or self.model

    @property
    def num_replicas(self) -> int:
        """How many are started; of external engines as many as there are."""
        return self.engine.num_external or self.replicas

    @model_validator(mode="after")
    def _all_external(self) -> AppConfig:
        there = self.engine.num_external
        if there and "replicas" in self.model_fields_set and self.replicas != there:
            raise ValueError(f"replicas is {self.replicas}, but engine.endpoints stands for {there}: leave it out")
        return self

    @model_validator(mode="after")
    def _one_name(self) -> AppConfig:
        if self.engine.served_model_name:
            raise ValueError("engine.served_model_name is what `model` is for; what is loaded goes into engine.model")
        return self

    @model_validator(mode="after")
    def _told_apart(self) -> AppConfig:
        if any(one.also for one in self.also):
            raise ValueError("also: a further model has no further ones itself")
        names = [name for one in self.all_models for name in one.names]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"also: {', '.join(twice)} is the name of two models or adapters")
        fleets = [one.fleet_name for one in self.all_models]
        if len(set(fleets)) < len(fleets):
            raise ValueError("also: every model needs a fleet of its own")
        return self
