"""The names that one engine serves: its base model and the LoRA adapters on it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replicas.emulated.errors import ApiError


@dataclass(frozen=True, slots=True)
class Adapter:
    """`lora_id` counts from 1 in the order of loading and is never used again."""

    name: str
    path: str
    lora_id: int


def parse_module(text: str) -> tuple[str, str]:
    """(name, path) of a `--lora-modules` value: NAME, NAME=PATH, or a JSON object. Raises ValueError."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, path = str(given["name"]), str(given["path"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"lora_modules: {text!r} must have a name and a path") from error
    else:
        name, _, path = text.partition("=")
    if not name:
        raise ValueError(f"lora_modules: {text!r} has no name")
    return name, path or name


class ServedModels:
    """`modules` as `parse_module` takes them."""

    def __init__(self, base: str, modules: Sequence[str] = (), *, max_model_len: int = 0) -> None:
        self.base = base
        self._adapters: dict[str, Adapter] = {}
        self._max_model_len = max_model_len
        self._created = int(time.time())
        self._num_loaded = 0
        for module in modules:
            self.load(*parse_module(module))

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def resolve(self, body: Mapping[str, Any]) -> str:
        """The served name that the body asks for; without a `model` it is the base model. Raises ApiError 404."""
        name = body.get("model")
        if name is None or name == "":
            return self.base
        if isinstance(name, str) and (name == self.base or name in self._adapters):
            return name
        raise ApiError(404, f"The model `{name}` does not exist.", "model")

    def lora_id(self, name: str) -> int | None:
        adapter = self._adapters.get(name)
        return adapter.lora_id if adapter else None

    def load(self, name: str, path: str, *, in_place: bool = False) -> str:
        """Adds an adapter, or replaces one in place; what vLLM says of it. Raises ApiError 400."""
        if not name or not path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if name == self.base:
            message = f"The lora adapter '{name}' conflicts with a served base model."
            raise ApiError(400, message, kind="InvalidUserInput")
        old = self._adapters.get(name)
        if old is not None and not in_place:
            message = f"The lora adapter '{name}' has already been loaded. To replace it, set 'load_inplace' to True."
            raise ApiError(400, message, kind="InvalidUserInput")
        if old is None:
            self._num_loaded += 1
        self._adapters[name] = Adapter(name, path, old.lora_id if old else self._num_loaded)
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        """Raises ApiError 400 or 404."""
        if not name:
            raise ApiError(400, "'lora_name' must be provided to unload an adapter.", kind="InvalidUserInput")
        if self._adapters.pop(name, None) is None:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def cards(self) -> list[dict[str, Any]]:
        """What /v1/models lists: the base model, then the adapters with it as their parent."""
        # vLLM gives the length with the base model alone.
        base = self._card(self.base, self.base, None, self._max_model_len)
        return [base, *(self._card(a.name, a.path, self.base, None) for a in self._adapters.values())]

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
        }
