"""Request body -> token ids: exactly the ids that vLLM would cache for it.

    body --> messages as vLLM sees them --> chat template --> text --> tokenizer --> ids --> Prompt
             (chat_messages)                (chat_template)

What can't be told here raises `UnknownPrompt`; such a request is still routed (by load), and the engine judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api_forms import FORM_PATHS, FormRules, chat_body, find_rules
from router.chat_messages import as_system_messages, conversation, malformed, tool_dicts
from router.chat_template import ChatTemplate, RenderOptions, compile_template
from router.errors import InvalidRequest, UnknownPrompt
from router.hashing import HashChain, chain, pack_token_ids, root_hash
from router.media import Heads, has_media
from router.memo import PrefixMemo
from router.model_files import ModelFiles, load_model_files
from router.tokenizing import TextEncoder
from router.types import BlockHash, HashedPrompt, Prompt

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOKENIZE_PATH = "/tokenize"

_SLOW_BYTES = 16_384
_FAST_BYTES = 131_072
_MAX_TOKEN_ID = 2**32 - 1
_BOM = b"\xef\xbb\xbf"
# Arguments of transformers' apply_chat_template: as template variables they'd mean something else to the engine.
_RESERVED_KWARGS = {
    *("conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}
# vLLM renders these without the model's Jinja template.
_OWN_RENDERERS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4"})


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises `InvalidRequest` for anything else."""
    try:
        body = msgspec.json.decode(raw.removeprefix(_BOM))
    except RecursionError as e:
        raise InvalidRequest("The request body is nested too deeply.") from e
    except (msgspec.MsgspecError, ValueError) as e:
        raise InvalidRequest(f"The request body is not valid JSON: {e}.") from e
    if not isinstance(body, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return body


class PromptEncoder:
    """One model's prompts. Stateless after loading: safe to share between threads."""

    def __init__(
        self,
        model: str,
        files: ModelFiles,
        adapters: Sequence[str] = (),
        options: RenderOptions | None = None,
        *,
        fast: bool = False,
    ) -> None:
        self.model = model
        self._files = files
        self._tokenizer = files.tokenizer
        self._text = TextEncoder(files.tokenizer, fast=fast)
        self._memo = PrefixMemo(self._text.packed, self._text.cuts) if self._text.cuts else None
        self._rules: FormRules | None = None
        self._heads: Heads | None = None
        self._adds_special = bool(self._tokenizer.encode("", add_special_tokens=True).ids)
        self._adapters = frozenset(adapters)
        self._options = options or RenderOptions()

    @classmethod
    def load(
        cls,
        model: str,
        tokenizer: str = "",
        adapters: Sequence[str] = (),
        *,
        options: RenderOptions | None = None,
        fast: bool = False,
    ) -> PromptEncoder:
        """`model` is the base model's served name; `tokenizer`, or `model` when empty, says where the files are.

        That is a folder, "builtin" (Qwen3's files, no network), or a Hugging Face id. Raises `ModelNotFound`.
        `fast`: look for a faster tokenizer in the background (see `router.tokenizing`).
        """
        return cls(model, load_model_files(tokenizer or model), adapters, options, fast=fast)

    @property
    def off_loop_bytes(self) -> int:
        """Bodies above this size take longer than an event loop should be held up for, unless they are remembered."""
        return _SLOW_BYTES if self._text.backend == "tokenizers" else _FAST_BYTES

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        """Like `prompt`, with block hashes in place of ids. What an earlier prompt had in common is not done again."""
        path, body = self._as_chat(path, body)
        if path == CHAT_PATH and has_media(body.get("messages")):
            return self._hashed_head(body, block_size)
        memo = self._memo
        if memo is None or path != CHAT_PATH or _given_ids(body) or not self._whole_text(body):
            prompt = self.prompt(path, body)
            hashes = HashChain(b"".join(chain(prompt.root, prompt.token_ids, block_size)))
            return HashedPrompt(prompt.num_tokens, hashes, prompt.reusable)
        try:
            tokens, hashes = memo.chain(self._root(body), self._chat_text(body), block_size)
        except (UnicodeError, TypeError, ValueError) as e:
            raise malformed(f"text can't be tokenised: {type(e).__name__}") from e
        return HashedPrompt(tokens, hashes, _is_reusable(path, body))

    def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """What the engine will cache for a body with one prompt. `path` is the URL path without its query.

        Of a chat with media only what stands before them. Raises `UnknownPrompt`: "path", "batch", "model",
        "multimodal", "prompt_embeds", "template" or "malformed".
        """
        path, body = self._as_chat(path, body)
        root = self._root(body)
        if path == CHAT_PATH and has_media(body.get("messages")):
            memo, text, _ = self._head(body)
            return Prompt(memo.ids(text), root, _is_reusable(path, body), whole=False)
        if path == COMPLETIONS_PATH and _is_batch(body.get("prompt")):
            raise UnknownPrompt("batch")
        (ids,) = self.token_ids(path, body)
        return Prompt(pack_token_ids(ids), root, reusable=_is_reusable(path, body))

    def _hashed_head(self, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        memo, text, following = self._head(body)
        tokens, hashes = memo.chain(self._root(body), text, block_size)
        return HashedPrompt(tokens + following, hashes, _is_reusable(CHAT_PATH, body), whole=False)

    def _head(self, body: Mapping[str, Any]) -> tuple[PrefixMemo, str, int]:
        """What stands before the first message with media; see `router.media`."""
        memo = self._memo
        if memo is None or _given_ids(body) or not self._whole_text(body):
            raise UnknownPrompt("multimodal")
        if self._heads is None:
            added = self._tokenizer.get_added_tokens_decoder().values()
            self._heads = Heads(self._chat_text, memo.last_cut, [one.content for one in added if one.special])
        return memo, *self._heads.head(body)

    def token_ids(self, path: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of every prompt in the body, in its order. Raises `UnknownPrompt` as `prompt()` does."""
        if path == CHAT_PATH:
            return [_given_ids(body) or self._truncated(self._chat_text(body), body, special=False)]
        if path == COMPLETIONS_PATH:
            if body.get("prompt_embeds") is not None:
                raise UnknownPrompt("prompt_embeds")
            return [self._completion_ids(p, body) for p in _prompts(body.get("prompt"))]
        if path == TOKENIZE_PATH and body.get("prompt") is not None:
            if not isinstance(body["prompt"], str):
                raise malformed("prompt must be a string")
            return [self._encode(body["prompt"], _flag(body, "add_special_tokens", True))]
        if path == TOKENIZE_PATH:
            return [self._encode(self._chat_text(body), _flag(body, "add_special_tokens", False))]
        raise UnknownPrompt("path", path[:100])

    def encode_text(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of plain text. Raises `UnknownPrompt` for text that isn't Unicode (lone surrogates)."""
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _as_chat(self, path: str, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Responses and Messages are chats to the engine."""
        if path not in FORM_PATHS:
            return path, body
        if self._rules is None:
            self._rules = find_rules(self._chat_text)
        return CHAT_PATH, chat_body(path, body, self._rules)

    def _root(self, body: Mapping[str, Any]) -> BlockHash:
        lora = self._adapter(body)
        salt = body.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise malformed("cache_salt must be a string that isn't empty")
        return root_hash(self.model, lora, salt)

    def _whole_text(self, body: Mapping[str, Any]) -> bool:
        """Are the ids those of the rendered text, with nothing added or cut off?"""
        return _truncation(body) is None and not (_flag(body, "add_special_tokens", False) and self._adds_special)

    def _adapter(self, body: Mapping[str, Any]) -> str | None:
        name = body.get("model")
        if name is None or name == self.model:
            return None
        if isinstance(name, str) and name in self._adapters:
            return name
        # It may be an adapter that was loaded behind our back: its blocks are not the base model's.
        raise UnknownPrompt("model")

    def _completion_ids(self, prompt: str | list[int], body: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return self._truncated(prompt, body, special=True)
        limit = _truncation(body)
        if limit is None or limit >= len(prompt):
            return prompt
        return _cut(prompt, limit, _truncation_side(body))

    def _chat_text(self, body: Mapping[str, Any]) -> str:
        if self._files.model_type in _OWN_RENDERERS:
            raise UnknownPrompt("template", f"{self._files.model_type} is rendered by code, not by a template")
        variables = self._variables(body)
        template = self._template(body, tools=variables["tools"] is not None)
        wanted = self._options.content_format
        messages = conversation(body.get("messages"), template.content_format if wanted == "auto" else wanted)
        if not template.knows_developers and any(message["role"] == "developer" for message in messages):
            messages = as_system_messages(messages)
        return template.render(messages, variables, continue_final_message=_flag(body, "continue_final_message", False))

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the template sees besides the messages: server defaults < tools < the client's < fields of their own."""
        tools = tool_dicts(body.get("tools"))
        if self._options.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none":
            tools = None
        own = {
            "add_generation_prompt": _flag(body, "add_generation_prompt", True),
            "documents": body.get("documents"),
            "reasoning_effort": (effort := body.get("reasoning_effort")),
        }
        chosen = body.get("chat_template_kwargs")
        if not isinstance(chosen, dict | None):
            raise malformed("chat_template_kwargs must be an object")
        if effort is not None and "enable_thinking" not in (chosen or {}):
            own["enable_thinking"] = effort != "none"
        variables: dict[str, Any] = {
            **self._files.special_tokens,
            "documents": None,
            **self._options.default_chat_template_kwargs,
            "tools": tools,
        }
        # vLLM takes None and "auto" for "not said".
        variables |= {k: v for k, v in ((chosen or {}) | _said(own)).items() if v is not None and v != "auto"}
        if variables.keys() & _RESERVED_KWARGS:
            raise UnknownPrompt("template", "reserved chat_template_kwargs")
        for key in ("tools", "documents"):
            if not _is_list_of_dicts(variables[key]):
                raise malformed(f"{key} must be a list of objects")
        return variables

    def _template(self, body: Mapping[str, Any], *, tools: bool) -> ChatTemplate:
        asked = body.get("chat_template")
        if asked is not None and not self._options.trust_request_chat_template:
            raise UnknownPrompt("template", "a client's chat_template is left to the engine")
        source = asked or self._options.chat_template
        named = self._files.templates
        if not isinstance(source, str):
            raise malformed("chat_template must be a string")
        if source:
            return compile_template(named.get(source, source))
        if tools and "tool_use" in named:
            return compile_template(named["tool_use"])
        if "default" not in named:
            raise UnknownPrompt("template", "the model has no chat template")
        return compile_template(named["default"])

    def _truncated(self, text: str, body: Mapping[str, Any], *, special: bool) -> list[int]:
        """Ids after `truncate_prompt_tokens`, which leaves special tokens in place and cuts the text's own."""
        special = _flag(body, "add_special_tokens", special)
        ids = self._encode(text, special)
        limit = _truncation(body)
        if limit is None or limit >= len(ids):
            return ids
        side = _truncation_side(body)
        bare = self._encode(text, False) if special else ids
        if len(bare) == len(ids):
            return _cut(ids, limit, side)
        room = limit - (len(ids) - len(bare))
        at = next((i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare), None)
        if at is None or room < 0:
            raise malformed("truncate_prompt_tokens leaves no room for the special tokens")
        return ids[:at] + _cut(bare, room, side) + ids[at + len(bare) :]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The one place where text becomes ids."""
        try:
            if not (add_special_tokens and self._adds_special):
                return self._text.ids(text)
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeError, TypeError, ValueError) as e:
            raise malformed(f"text can't be tokenised: {type(e).__name__}") from e


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in fields.items() if v is not None and v != "auto"}


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise malformed(f"{key} must be true or false")
    return value


def _truncation(body: Mapping[str, Any]) -> int | None:
    """Tokens to keep. -1 means the model's own maximum, which a prompt that can be served doesn't reach."""
    value = body.get("truncate_prompt_tokens")
    if value is None or value == -1:
        return None
    if not _is_int(value) or value < 0:
        raise malformed("truncate_prompt_tokens must be an integer of at least -1")
    return int(value)


def _truncation_side(body: Mapping[str, Any]) -> str:
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise malformed("truncation_side must be left or right")
    return side or "left"


def _cut(ids: list[int], keep: int, side: str) -> list[int]:
    return ids[:keep] if side == "right" else ids[len(ids) - keep :]


def _given_ids(body: Mapping[str, Any]) -> list[int] | None:
    """Ids that a client (or a prefill stage) sends along with a chat: the engine then renders nothing."""
    params = body.get("kv_transfer_params")
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if not ids:
        return None
    if not _is_ids(ids):
        raise malformed("prompt_token_ids must be a list of token ids")
    conversation(body.get("messages"), "string")  # ids don't count beside images: raises for those
    return list(ids)


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(_is_ids(p) for p in prompt):
            return list(prompt)
    raise malformed("prompt must be a string, a list of token ids, or a list of either")


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(i) and 0 <= i <= _MAX_TOKEN_ID for i in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of_dicts(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(v, dict) for v in value))


def _is_reusable(path: str, body: Mapping[str, Any]) -> bool:
    """False where the engine needs logits of every prompt token and so computes all of them (even for top-0)."""
    if body.get("prompt_logprobs") is not None:
        return False
    if not body.get("echo"):
        return True
    # A chat's top_logprobs default to 0, a completion's logprobs to none.
    asked = body.get("top_logprobs", 0) if path == CHAT_PATH else body.get("logprobs")
    return asked is None
