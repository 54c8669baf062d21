"""LoRA adapters for the tiny Llama, made without a network."""

from __future__ import annotations

import json
from pathlib import Path

from tests.vllm.models import _HEAD_DIM, _HEADS, _HIDDEN, _LAYERS

RANK = 8


def tiny_adapter(folder: Path, seed: int) -> Path:
    """`folder`, with random weights for the attention's q and v projections."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(_LAYERS):
        for name in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, _HIDDEN, generator=generator) * 0.05
            weights[f"{prefix}.lora_B.weight"] = torch.randn(_HEADS * _HEAD_DIM, RANK, generator=generator) * 0.05
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "target_modules": ["q_proj", "v_proj"],
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
