"""A model that takes images, made without a network: Idefics3 with two layers, tokenizer of Qwen3 and no weights.

(It is one of few whose processor needs no torchvision. An engine gives it random weights with `--load-format dummy`.)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from router.model_files import _builtin_folder

IMAGE = "<image>"
_SPECIAL = (
    *(IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
_PARTS = {
    "in order": (
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    ),
    "images first": (
        "{% for p in m.content %}{% if p.type == 'image' %}<image>{% endif %}{% endfor %}"
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    ),
}
TEMPLATES = {
    name: "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    for name, parts in _PARTS.items()
}
"""Chat templates by where they put a message's images."""

_TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "pad_token_id": 151_643,
    "eos_token_id": 151_645,
}
_VISION = {
    "model_type": "idefics3_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_PIXELS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"longest_edge": 112},
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 56},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_pad": True,
    "resample": 1,
}


def tiny_idefics3(folder: Path, template: str = TEMPLATES["in order"]) -> Path:
    """`folder`, filled."""
    for file in _builtin_folder().iterdir():
        shutil.copy(file, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    settings.setdefault("added_tokens_decoder", {}).update(
        {str(tokenizer.token_to_id(name)): {"content": name, "special": True, **flags} for name in _SPECIAL}
    )
    _write(folder / "tokenizer_config.json", settings | {"chat_template": template})
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "scale_factor": 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "pad_token_id": 151_643,
        "text_config": _TEXT,
        "vision_config": _VISION,
    }
    _write(folder / "config.json", config)
    _write(folder / "preprocessor_config.json", _PIXELS)
    _write(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})
    return folder


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
