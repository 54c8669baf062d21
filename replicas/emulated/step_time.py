"""How long one engine step takes, in seconds.

    step = a + b*prefill_tokens + c*decoding_seqs + d*sum(chunk * context) + e*sum(decode context)

`a` is what every step costs (reading the weights, launching), `b` a prefill token's matrix work, `c` a decoding
sequence's share, `d` attention of a prefill chunk over its context, `e` reading the KV cache of the decoding ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import yaml


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    `prefill_attention` sums chunk length x mean context over the prefill chunks, in tokens squared; `decode_context`
    sums the context lengths of the decoding sequences, in tokens.
    """

    prefill_tokens: int = 0
    decoding_seqs: int = 0
    prefill_attention: float = 0.0
    decode_context: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """The five parameters, in seconds per unit of the module's formula."""

    a: float
    b: float
    c: float
    d: float
    e: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"step-time parameter {field.name} must be a number of seconds >= 0, not {value!r}")

    def seconds(self, work: StepWork) -> float:
        return (
            self.a
            + self.b * work.prefill_tokens
            + self.c * work.decoding_seqs
            + self.d * work.prefill_attention
            + self.e * work.decode_context
        )


DEFAULT_PROFILE = "a100x4-qwen72b"

PROFILES: Mapping[str, StepTime] = {
    # Qwen2.5-72B in bf16, tensor-parallel over 4 x A100-80G, fitted to published TTFT and throughput.
    "a100x4-qwen72b": StepTime(a=29e-3, b=0.26e-3, c=0.28e-3, d=6.1e-9, e=6.6e-8),
}


def load_profile(text: str) -> StepTime:
    """The profile that `text` names.

    A name in `PROFILES`; `linear:N`, which prefills N tokens/s in order and decodes for free; or the path of a JSON or
    YAML file with exactly the keys a, b, c, d, e. Raises ValueError naming the choices.
    """
    if text in PROFILES:
        return PROFILES[text]
    if text.startswith("linear:"):
        return _linear(text)
    if text.endswith((".json", ".yaml", ".yml")):
        return _from_file(text)
    raise ValueError(f"unknown step-time profile {text!r}; {_choices()}")


def _linear(text: str) -> StepTime:
    try:
        rate = float(text.removeprefix("linear:"))
    except ValueError:
        rate = 0.0
    if not math.isfinite(rate) or rate <= 0:
        raise ValueError(f"{text!r} needs a positive number of prefill tokens per second; {_choices()}")
    return StepTime(a=0.0, b=1.0 / rate, c=0.0, d=0.0, e=0.0)


def _from_file(path: str) -> StepTime:
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"can't read the step-time profile {path!r}: {error}; {_choices()}") from error
    names = [field.name for field in fields(StepTime)]
    if not isinstance(data, dict) or sorted(map(str, data)) != names:
        raise ValueError(f"{path!r} must map exactly {', '.join(names)} to seconds; {_choices()}")
    try:
        # float() as well for what YAML 1.1 reads as text, such as 3e-8 without a point.
        return StepTime(**{name: float(data[name]) for name in names})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path!r}: {error}; {_choices()}") from error


def _choices() -> str:
    return f"choose one of {', '.join(PROFILES)}, linear:TOKENS_PER_SECOND, or a .json, .yaml or .yml file"
