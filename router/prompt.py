"""Request body -> token ids: exactly the ids that vLLM would cache for it.

    body --> messages as vLLM sees them --> chat template --> text --> tokenizer --> ids --> Prompt
             (chat_messages)                (chat_template)

What can't be told here raises `UnknownPrompt`; such a request is still routed (by load), and the engine judges it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.api_forms import FORM_PATHS, FormRules, chat_body, find_rules
from router.body_fields import (
    flag,
    given_ids,
    is_batch,
    is_list_of_dicts,
    is_reusable,
    prompts,
    said,
    truncation,
    truncation_side,
)
from router.chat_messages import as_system_messages, conversation, malformed, tool_dicts
from router.chat_template import RenderOptions
from router.errors import InvalidRequest, UnknownPrompt
from router.handover import takes_token_ids
from router.hashing import HashChain, chain, pack_token_ids, root_hash
from router.media import Heads, has_media
from router.memo import PrefixMemo
from router.model_files import ModelFiles, load_model_files
from router.templates import ModelTemplates
from router.tokenizing import TextEncoder
from router.types import BlockHash, HashedPrompt, Prompt

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOKENIZE_PATH = "/tokenize"

_SLOW_BYTES = 16_384
_FAST_BYTES = 262_144
_BOM = b"\xef\xbb\xbf"
# Arguments of transformers' apply_chat_template: as template variables they'd mean something else to the engine.
_RESERVED_KWARGS = {
    *("conversation", "messages", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
}


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
        keep_ids: bool = False,
    ) -> None:
        self.model = model
        self._keep_ids = keep_ids
        self.files = files
        self._tokenizer = files.tokenizer
        self._text = TextEncoder(files.tokenizer, fast=fast)
        self._memo = PrefixMemo(self._text.packed, self._text.cuts, keep_ids=keep_ids) if self._text.cuts else None
        self._rules: FormRules | None = None
        self._heads: Heads | None = None
        self._adds_special = bool(self._tokenizer.encode("", add_special_tokens=True).ids)
        self._adapters = frozenset(adapters)
        self._options = options or RenderOptions()
        self._templates = ModelTemplates(files, self._options, fast=fast)

    @classmethod
    def load(
        cls,
        model: str,
        tokenizer: str = "",
        adapters: Sequence[str] = (),
        *,
        options: RenderOptions | None = None,
        fast: bool = False,
        keep_ids: bool = False,
    ) -> PromptEncoder:
        """`model` is the base model's served name; `tokenizer`, or `model` when empty, says where the files are.

        That is a folder, "builtin" (Qwen3's files, no network), or a Hugging Face id. Raises `ModelNotFound`.
        `fast`: look for a faster tokenizer and renderer in the background (`router.tokenizing`, `router.templates`).
        `keep_ids`: `hashed` also gives a chat's ids for the engine (`router.handover`).
        """
        return cls(model, load_model_files(tokenizer or model), adapters, options, fast=fast, keep_ids=keep_ids)

    @property
    def off_loop_bytes(self) -> int:
        """Bodies above this size take longer than an event loop should be held up for, unless they are remembered."""
        return _SLOW_BYTES if self._text.backend == "tokenizers" else _FAST_BYTES

    def settle(self, timeout_s: float) -> Mapping[str, str]:
        """Wait until the faster parts have proven themselves or not. What does what now: tokenizer, templates by name.

        Raises TimeoutError. Nothing needs this but measurements: until then the reference does the work.
        """
        end = time.monotonic() + timeout_s
        for prover in (self._text.prover, self._templates.prover):
            if prover.ident is not None:
                prover.join(max(0.0, end - time.monotonic()))
                if prover.is_alive():
                    raise TimeoutError(prover.name)
        return {"tokenizer": self._text.why or self._text.backend, **self._templates.backends}

    def hashed(self, path: str, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        """Like `prompt`, with block hashes in place of ids. What an earlier prompt had in common is not done again."""
        hand_over = self._keep_ids and takes_token_ids(body)
        path, body = self._as_chat(path, body)
        if path == CHAT_PATH and has_media(body.get("messages")):
            return self._hashed_head(body, block_size)
        memo = self._memo
        if memo is None or path != CHAT_PATH or given_ids(body) or not self._whole_text(body):
            prompt = self.prompt(path, body)
            hashes = HashChain(b"".join(chain(prompt.root, prompt.token_ids, block_size)))
            return HashedPrompt(prompt.num_tokens, hashes, prompt.reusable)
        try:
            tokens, hashes, ids = memo.chain_and_ids(self._root(body), self._chat_text(body), block_size)
        except (UnicodeError, TypeError, ValueError) as e:
            raise malformed(f"text can't be tokenised: {type(e).__name__}") from e
        reusable = is_reusable(body, chat=True)
        return HashedPrompt(tokens, hashes, reusable, token_ids=ids if hand_over and reusable else b"")

    def hashed_ids(self, path: str, body: Mapping[str, Any], ids: list[int], block_size: int) -> HashedPrompt:
        """The same for a chat whose ids an engine has told. Raises `UnknownPrompt`."""
        hashes = chain(self._root(body), pack_token_ids(ids), block_size)
        return HashedPrompt(len(ids), HashChain(b"".join(hashes)), is_reusable(body, chat=path == CHAT_PATH))

    def prompt(self, path: str, body: Mapping[str, Any]) -> Prompt:
        """What the engine will cache for a body with one prompt. `path` is the URL path without its query.

        Of a chat with media only what stands before them. Raises `UnknownPrompt`: "path", "batch", "model",
        "multimodal", "prompt_embeds", "template" or "malformed".
        """
        path, body = self._as_chat(path, body)
        root = self._root(body)
        if path == CHAT_PATH and has_media(body.get("messages")):
            _, text, _ = self._head(body)
            return Prompt(pack_token_ids(self._encode(text, False)), root, is_reusable(body, chat=True), whole=False)
        if path == COMPLETIONS_PATH and is_batch(body.get("prompt")):
            raise UnknownPrompt("batch")
        (ids,) = self.token_ids(path, body)
        return Prompt(pack_token_ids(ids), root, reusable=is_reusable(body, chat=path == CHAT_PATH))

    def _hashed_head(self, body: Mapping[str, Any], block_size: int) -> HashedPrompt:
        memo, text, following = self._head(body)
        try:
            tokens, hashes = memo.chain(self._root(body), text, block_size)
        except (UnicodeError, TypeError, ValueError) as e:
            raise malformed(f"text can't be tokenised: {type(e).__name__}") from e
        return HashedPrompt(tokens + following, hashes, is_reusable(body, chat=True), whole=False)

    def _head(self, body: Mapping[str, Any]) -> tuple[PrefixMemo, str, int]:
        """What stands before the first message with media; see `router.media`."""
        memo = self._memo
        if memo is None or given_ids(body) or not self._whole_text(body):
            raise UnknownPrompt("multimodal")
        if self._heads is None:
            added = self._tokenizer.get_added_tokens_decoder().values()
            self._heads = Heads(self._chat_text, memo.last_cut, [one.content for one in added if one.special])
        return memo, *self._heads.head(body)

    def token_ids(self, path: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Token ids of every prompt in the body, in its order. Raises `UnknownPrompt` as `prompt()` does."""
        if path == CHAT_PATH:
            return [given_ids(body) or self._truncated(self._chat_text(body), body, special=False)]
        if path == COMPLETIONS_PATH:
            if body.get("prompt_embeds") is not None:
                raise UnknownPrompt("prompt_embeds")
            return [self._completion_ids(p, body) for p in prompts(body.get("prompt"))]
        if path == TOKENIZE_PATH and body.get("prompt") is not None:
            if not isinstance(body["prompt"], str):
                raise malformed("prompt must be a string")
            return [self._encode(body["prompt"], flag(body, "add_special_tokens", True))]
        if path == TOKENIZE_PATH:
            return [self._encode(self._chat_text(body), flag(body, "add_special_tokens", False))]
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
        return truncation(body) is None and not (flag(body, "add_special_tokens", False) and self._adds_special)

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
        limit = truncation(body)
        if limit is None or limit >= len(prompt):
            return prompt
        return _cut(prompt, limit, truncation_side(body))

    def _chat_text(self, body: Mapping[str, Any]) -> str:
        variables = self._variables(body)
        template = self._templates.choose(body, tools=variables["tools"] is not None)
        messages = conversation(body.get("messages"), self._templates.content_format(template))
        if not template.knows_developers and any(message["role"] == "developer" for message in messages):
            messages = as_system_messages(messages)
        return template.render(messages, variables, continue_final_message=flag(body, "continue_final_message", False))

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the template sees besides the messages: server defaults < tools < the client's < fields of their own."""
        tools = tool_dicts(body.get("tools"))
        if self._options.exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none":
            tools = None
        own = {
            "add_generation_prompt": flag(body, "add_generation_prompt", True),
            "documents": body.get("documents"),
            "reasoning_effort": (effort := body.get("reasoning_effort")),
        }
        chosen = body.get("chat_template_kwargs")
        if not isinstance(chosen, dict | None):
            raise malformed("chat_template_kwargs must be an object")
        if effort is not None and "enable_thinking" not in (chosen or {}):
            own["enable_thinking"] = effort != "none"
        variables: dict[str, Any] = {
            **self.files.special_tokens,
            "documents": None,
            **self._options.default_chat_template_kwargs,
            "tools": tools,
        }
        variables |= said((chosen or {}) | said(own))
        if variables.keys() & _RESERVED_KWARGS:
            raise UnknownPrompt("template", "reserved chat_template_kwargs")
        for key in ("tools", "documents"):
            if not is_list_of_dicts(variables[key]):
                raise malformed(f"{key} must be a list of objects")
        return variables

    def _truncated(self, text: str, body: Mapping[str, Any], *, special: bool) -> list[int]:
        """Ids after `truncate_prompt_tokens`, which leaves special tokens in place and cuts the text's own."""
        special = flag(body, "add_special_tokens", special)
        ids = self._encode(text, special)
        limit = truncation(body)
        if limit is None or limit >= len(ids):
            return ids
        side = truncation_side(body)
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


def _cut(ids: list[int], keep: int, side: str) -> list[int]:
    return ids[:keep] if side == "right" else ids[len(ids) - keep :]
