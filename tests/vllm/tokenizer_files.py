"""Three tokenizers that have little in common, each with a chat template that knows tools; made without a network.

qwen3      byte-level BPE, 26 added tokens, its own template
headers    SmolLM2's byte-level BPE with single digits; a template with parts, macros and indented schemas
brackets   Mistral's SentencePiece model (with Metaspace, byte fallback, 771 added tokens), strict turns
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from router.model_files import _builtin_folder
from tests.vllm.gguf import read_gguf, write_tokenizer
from tests.vllm.models import smollm2_file

_TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
_MISTRAL = "data/mistral_instruct_tokenizer_240323.model.v3"


def qwen3(folder: Path) -> Path:
    for file in _builtin_folder().iterdir():
        shutil.copy(file, folder)
    return folder


def headers(folder: Path) -> Path:
    write_tokenizer(read_gguf(smollm2_file(), tensors=False).metadata, folder)
    shutil.copy(_TEMPLATES / "headers.jinja", folder / "chat_template.jinja")
    return folder


def brackets(folder: Path) -> Path:
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.submodule_search_locations
    shutil.copy(Path(spec.submodule_search_locations[0]) / _MISTRAL, folder / "tokenizer.model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with warnings.catch_warnings(action="ignore"):
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    shutil.copy(_TEMPLATES / "brackets.jinja", folder / "chat_template.jinja")
    return folder


MAKERS: Mapping[str, Callable[[Path], Path]] = {"qwen3": qwen3, "headers": headers, "brackets": brackets}
