"""A Llama in a GGUF file -> a folder as Hugging Face lays it out: safetensors, config, tokenizer, chat template.

    magic, version, counts | metadata: key type value ... | tensors: name shape type offset ... | pad | data

Numbers are little-endian; the format is described at github.com/ggml-org/ggml, docs/gguf.md. Only what one file needs
is understood: F32, Q4_1 and Q8_0 tensors, and a byte-level BPE tokenizer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL = 3  # the type of special tokens
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, slots=True)
class Gguf:
    metadata: dict[str, Any]
    tensors: dict[str, Weights]


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        form = struct.Struct(f"<{code}")
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.at += length
        return bytes(self.data[self.at - length : self.at]).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, length = self.scalar("I"), self.scalar("Q")
            return [self.value(kind) for _ in range(length)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path, *, tensors: bool = True) -> Gguf:
    reader = _Reader(memoryview(path.read_bytes()))
    if bytes(reader.data[:4]) != b"GGUF":
        raise ValueError(f"{path} is no GGUF file")
    reader.at = 8
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    metadata = {reader.text(): reader.value(reader.scalar("I")) for _ in range(num_keys)}
    if not tensors:
        return Gguf(metadata, {})
    headers = []
    for _ in range(num_tensors):
        name = reader.text()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        headers.append((name, shape[::-1], reader.scalar("I"), reader.scalar("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-reader.at // alignment) * alignment
    decoded = {name: _DECODERS[kind](reader.data[start + at :], shape) for name, shape, kind, at in headers}
    return Gguf(metadata, decoded)


def _f32(data: memoryview, shape: list[int]) -> Weights:
    return np.frombuffer(data, np.float32, int(np.prod(shape))).reshape(shape)


def _q4_1(data: memoryview, shape: list[int]) -> Weights:
    """Blocks of 32 weights: scale, minimum, and 16 bytes whose low halves are the first 16 weights."""
    form = np.dtype([("scale", "<f2"), ("least", "<f2"), ("packed", "u1", 16)])
    blocks = np.frombuffer(data, form, int(np.prod(shape)) // 32)
    levels = np.concatenate([blocks["packed"] & 15, blocks["packed"] >> 4], axis=1).astype(np.float32)
    scale, least = blocks["scale"].astype(np.float32), blocks["least"].astype(np.float32)
    weights: Weights = levels * scale[:, None] + least[:, None]
    return weights.reshape(shape)


def _q8_0(data: memoryview, shape: list[int]) -> Weights:
    """Blocks of 32 weights: scale, and a signed byte each."""
    form = np.dtype([("scale", "<f2"), ("levels", "i1", 32)])
    blocks = np.frombuffer(data, form, int(np.prod(shape)) // 32)
    return (blocks["levels"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]).reshape(shape)


_DECODERS: dict[int, Callable[[memoryview, list[int]], Weights]] = {0: _f32, 3: _q4_1, 8: _q8_0}


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of `path` into the existing `folder`, its weights as bfloat16."""
    import torch
    from safetensors.torch import save_file

    gguf = read_gguf(path)
    told = gguf.metadata
    heads, kv_heads = told["llama.attention.head_count"], told["llama.attention.head_count_kv"]
    weights = {}
    for name, tensor in gguf.tensors.items():
        if name.endswith("attn_q.weight"):
            tensor = _in_halves(tensor, heads)
        elif name.endswith("attn_k.weight"):
            tensor = _in_halves(tensor, kv_heads)
        weights[_name(name)] = torch.from_numpy(np.array(tensor)).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": told["llama.embedding_length"],
        "intermediate_size": told["llama.feed_forward_length"],
        "num_hidden_layers": told["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": told["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "rms_norm_eps": told["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": told["llama.rope.freq_base"],
        "max_position_embeddings": told["llama.context_length"],
        "vocab_size": told["llama.vocab_size"],
        "bos_token_id": told["tokenizer.ggml.bos_token_id"],
        "eos_token_id": told["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(told, folder)


def _name(name: str) -> str:
    special = {
        "token_embd": "model.embed_tokens.weight",
        "output_norm": "model.norm.weight",
        "output": "lm_head.weight",
    }
    stem = name.removesuffix(".weight")
    if stem in special:
        return special[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def _in_halves(tensor: Weights, heads: int) -> Weights:
    """Rows of each head from (pair, half) order, as GGUF has them, to (half, pair), as rotary embedding wants them."""
    rows, columns = tensor.shape
    return tensor.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(told: dict[str, Any], folder: Path) -> None:
    """The tokenizer's files, from a GGUF's metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = told["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in told["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = told["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": told["tokenizer.chat_template"],
        "bos_token": tokens[told["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[told["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[told["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[told["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": told["llama.context_length"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
