"""The Responses API, as vLLM answers it."""

from __future__ import annotations

import uuid
from typing import Any

from replicas.emulated.choices import Choice
from replicas.emulated.errors import ApiError
from replicas.emulated.forms import Reply, cached_and_created, data_event, named_event
from replicas.emulated.logprobs import chat_entries

# Echoed from the request, with what vLLM puts where nothing is asked for.
_ECHOED = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ResponsesForm:
    """One output item: a message, or a function call."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        (self._choice,) = reply.choices
        self._call = self._choice.call
        self._item_id = f"{'fc' if self._call else 'msg'}_{uuid.uuid4().hex}"
        self._sequence = 0
        self._text = ""

    def begin(self) -> list[bytes]:
        response = self._response("in_progress", [], None)
        events = [self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]
        if self._call is None:
            events.append(self._event("response.output_item.added", output_index=0, item=self._message("in_progress")))
            part = self._part("", [])
            events.append(self._event("response.content_part.added", **self._where(), content_index=0, part=part))
        else:
            item = self._function_call("", "in_progress")
            events.append(self._event("response.output_item.added", output_index=0, item=item))
        return events

    def token(self, choice: Choice, position: int, *, last: bool) -> bytes:
        if self._call is not None:
            delta = self._call.arguments_of(position)
            kind = "response.function_call_arguments.delta"
            return self._event(kind, **self._where(), delta=delta) if delta else b""
        delta = choice.token_text(position, last=last)
        self._text += delta
        if not delta:
            return b""
        logprobs = [
            {"token": one["token"], "logprob": one["logprob"], "top_logprobs": one["top_logprobs"]}
            for one in self._logprobs([choice.answer.texts[position - 1]]) or ()
        ]
        kind = "response.output_text.delta"
        return self._event(kind, **self._where(), content_index=0, delta=delta, logprobs=logprobs)

    def end(self, first: Choice) -> bytes:
        where = {**self._where(), "content_index": 0}
        if self._call is not None:
            arguments = self._call.arguments_until(self._choice.completion_tokens)
            kind, said = "response.function_call_arguments.done", {"arguments": arguments, "name": self._call.name}
            events = [self._event(kind, **self._where(), **said)]
        else:
            part = self._part(self._text, self._logprobs(self._choice.answer.texts))
            events = [
                self._event("response.output_text.done", **where, text=self._text, logprobs=[]),
                self._event("response.content_part.done", **where, part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=0, item=self._item()))
        events.append(self._event("response.completed", response=self.whole()))
        return b"".join(events)

    def whole(self) -> Any:
        cut = self._choice.request.finish_reason == "length"
        cached, created = cached_and_created(self._choice)
        prompt, generated = self._reply.num_prompt, self._reply.num_generated
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": created,
                "input_tokens_per_turn": [prompt],
                "cached_tokens_per_turn": [cached],
            },
            "output_tokens": generated,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [generated],
                "tool_output_tokens_per_turn": [0],
            },
            "total_tokens": prompt + generated,
        }
        return self._response("incomplete" if cut else "completed", [self._item()], usage)

    def error_event(self, error: ApiError) -> bytes:
        return data_event(error.body())

    def _response(self, status: str, output: list[Any], usage: Any) -> dict[str, Any]:
        body, generation = self._reply.body, self._reply.generation
        echoed = {key: default if body.get(key) is None else body[key] for key, default in _ECHOED.items()}
        tools = body.get("tools") or []
        return {
            "id": self._reply.id,
            "object": "response",
            "created_at": self._reply.created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": generation.model,
            "output": output,
            **echoed,
            "tool_choice": (body.get("tool_choice") or "auto") if tools else "none",
            "tools": tools,
            "max_output_tokens": generation.max_tokens or self._choice.request.num_output,
            "top_logprobs": generation.logprobs,
            "usage": usage,
            "kv_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _item(self) -> dict[str, Any]:
        if self._call is not None:
            return self._function_call(self._call.arguments_until(self._choice.completion_tokens), "completed")
        return self._message("completed", self._choice.whole_text())

    def _message(self, status: str, text: str = "") -> dict[str, Any]:
        content = [self._part(text, self._logprobs(self._choice.answer.texts))] if text else []
        return {"id": self._item_id, "content": content, "role": "assistant", "status": status, "type": "message"}

    def _part(self, text: str, logprobs: Any) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _function_call(self, arguments: str, status: str) -> dict[str, Any]:
        assert self._call is not None
        return {
            "arguments": arguments,
            "call_id": self._call.id,
            "name": self._call.name,
            "type": "function_call",
            "id": self._item_id,
            "status": status,
        }

    def _logprobs(self, texts: list[str]) -> list[dict[str, Any]] | None:
        count = self._reply.generation.logprobs
        return None if count is None else chat_entries(texts, self._reply.alternatives[:count])

    def _where(self) -> dict[str, Any]:
        return {"output_index": 0, "item_id": self._item_id}

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})
