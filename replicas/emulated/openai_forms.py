"""Chat completions and completions, as vLLM answers them: one event for each token of each choice."""

from __future__ import annotations

from typing import Any

from replicas.emulated.choices import Choice
from replicas.emulated.errors import ApiError
from replicas.emulated.forms import DONE, Reply, cached_and_created, data_event
from replicas.emulated.logprobs import chat_entries, completion_logprobs, prompt_logprobs


class ChatForm:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._generation = reply.generation
        self._head = _head(reply, "chat.completion.chunk" if reply.generation.stream else "chat.completion")

    def begin(self) -> list[bytes]:
        ids = {"prompt_token_ids": self._reply.choices[0].prompt_ids} if self._generation.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return [self._event(choice, 0, delta, {}, **ids) for choice in self._reply.choices]

    def token(self, choice: Choice, position: int, *, last: bool) -> bytes:
        generation, call = self._generation, choice.call
        shown: dict[str, Any] = {}
        if generation.logprobs is not None:
            entries = chat_entries([choice.answer.texts[position - 1]], self._reply.alternatives[: generation.logprobs])
            shown["logprobs"] = {"content": entries}
        if generation.return_token_ids:
            shown["token_ids"] = [choice.id_at(position)]
        needed = last or bool(shown)
        if last:
            shown |= {"finish_reason": choice.finish_reason(generation), "stop_reason": choice.stop_reason}
        if call is None:
            text = choice.token_text(position, last=last)
            return self._event(choice, position, {"content": text}, shown) if text or needed else b""
        head, arguments = b"", call.arguments_of(position)
        if call.is_named_by(position) and not call.is_named_by(position - 1):
            function = {"name": call.name, "arguments": ""}
            start = {"index": 0, "id": call.id, "type": "function", "function": function}
            head = self._event(choice, position, {"tool_calls": [start]}, {})
        if not arguments and not needed:
            return head
        more = {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {}
        return head + self._event(choice, position, more, shown)

    def end(self, first: Choice) -> bytes:
        if not self._generation.include_usage:
            return DONE
        return data_event({**self._head, "choices": [], "usage": _usage(self._reply, first, created=True)}) + DONE

    def whole(self) -> Any:
        reply, generation = self._reply, self._generation
        # vLLM reports the cached tokens of a batch's last prompt here, and those of the first one ready in a stream.
        return {
            **self._head,
            "choices": [self._whole_choice(choice) for choice in reply.choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(reply, reply.choices[-1], created=True),
            "prompt_logprobs": _prompt_logprobs(reply, reply.choices[0]),
            "prompt_token_ids": reply.choices[0].prompt_ids if generation.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def _whole_choice(self, choice: Choice) -> Any:
        generation, call = self._generation, choice.call
        message: dict[str, Any] = {"role": "assistant", "content": choice.whole_text() if call is None else ""}
        message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        if call is not None:
            function = {"name": call.name, "arguments": call.arguments_until(choice.completion_tokens)}
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        logprobs = None
        if generation.logprobs is not None:
            logprobs = {"content": chat_entries(choice.answer.texts, self._reply.alternatives[: generation.logprobs])}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason(generation),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.generated_ids() if generation.return_token_ids else None,
        }

    def _event(self, choice: Choice, position: int, delta: Any, shown: dict[str, Any], **extra: Any) -> bytes:
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, **shown}
        chunk = {**self._head, "choices": [entry], **extra}
        if self._generation.continuous_usage:
            chunk["usage"] = _counts(choice.request.num_prompt, position)
        return data_event(chunk)


class CompletionForm:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._generation = reply.generation
        self._head = _head(reply, "text_completion")
        # Characters of each choice that went out before.
        self._offsets = [0] * len(reply.choices)

    def begin(self) -> list[bytes]:
        return []

    def token(self, choice: Choice, position: int, *, last: bool) -> bytes:
        generation = self._generation
        text = choice.token_text(position, last=last)
        entry: dict[str, Any] = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
        if last:
            entry |= {"finish_reason": choice.finish_reason(generation), "stop_reason": choice.stop_reason}
        if generation.logprobs is not None:
            echo = self._echo_texts(choice) if position == 1 else []
            said = [] if choice.echo_only else [choice.answer.texts[position - 1]]
            entry["logprobs"] = self._logprobs(choice, [*echo, *said], echoes=bool(echo))
        if generation.return_token_ids:
            entry["token_ids"] = [] if choice.echo_only else [choice.id_at(position)]
            if position == 1:
                entry["prompt_token_ids"] = choice.prompt_ids
        if not (text or last or generation.return_token_ids or generation.logprobs is not None):
            return b""
        chunk = {**self._head, "choices": [entry]}
        if generation.continuous_usage:
            chunk["usage"] = _counts(choice.request.num_prompt, 0 if choice.echo_only else position)
        return data_event(chunk)

    def end(self, first: Choice) -> bytes:
        if not self._generation.include_usage:
            return DONE
        return data_event({**self._head, "choices": [], "usage": _usage(self._reply, first, created=False)}) + DONE

    def whole(self) -> Any:
        reply = self._reply
        return {
            **self._head,
            "choices": [self._whole_choice(choice) for choice in reply.choices],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": _usage(reply, reply.choices[-1], created=False),
            "kv_transfer_params": None,
        }

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def _whole_choice(self, choice: Choice) -> Any:
        generation = self._generation
        logprobs = None
        if generation.logprobs is not None:
            echo = self._echo_texts(choice)
            said = [] if choice.echo_only else choice.answer.texts
            logprobs = self._logprobs(choice, [*echo, *said], echoes=bool(echo))
        return {
            "index": choice.index,
            "text": choice.whole_text(),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason(generation),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.generated_ids() if generation.return_token_ids else None,
            "prompt_logprobs": _prompt_logprobs(self._reply, choice),
            "prompt_token_ids": choice.prompt_ids if generation.return_token_ids else None,
        }

    def _echo_texts(self, choice: Choice) -> list[str]:
        return [choice.decode([token]) for token in choice.echo_ids]

    def _logprobs(self, choice: Choice, texts: list[str], *, echoes: bool) -> Any:
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += sum(map(len, texts))
        alternatives = self._reply.alternatives[: self._generation.logprobs]
        return completion_logprobs(texts, alternatives, offset, first=echoes)


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.generation.model}


def _counts(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _usage(reply: Reply, cached_of: Choice, *, created: bool) -> dict[str, Any]:
    cached, new = cached_and_created(cached_of)
    details = {"cached_tokens": cached} | ({"created_cache_tokens": new} if created else {})
    return _counts(reply.num_prompt, reply.num_generated) | {"prompt_tokens_details": details}


def _prompt_logprobs(reply: Reply, choice: Choice) -> Any:
    count = reply.generation.prompt_logprobs
    if count is None:
        return None
    ids = choice.prompt_ids
    return prompt_logprobs(ids, [choice.decode([token]) for token in ids], reply.alternatives[:count])
