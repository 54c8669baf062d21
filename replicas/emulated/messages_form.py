"""The Messages API (Anthropic's), as vLLM answers it."""

from __future__ import annotations

import json
from typing import Any

from replicas.emulated.choices import Choice
from replicas.emulated.errors import ApiError
from replicas.emulated.forms import Reply, cached_and_created, named_event


class MessagesForm:
    """One content block: text, or the use of a tool."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        (self._choice,) = reply.choices
        self._call = self._choice.call
        self._open = False

    def begin(self) -> list[bytes]:
        # What of the prompt was cached is only told at the end.
        usage = {"input_tokens": self._reply.num_prompt, "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", message=message)]

    def token(self, choice: Choice, position: int, *, last: bool) -> bytes:
        call = self._call
        if call is None:
            text = choice.token_text(position, last=last)
            return self._delta({"type": "text_delta", "text": text}) if text else b""
        named, arguments = call.is_named_by(position), call.arguments_of(position)
        started = self._started() if named and not self._open else b""
        return started + (self._delta({"type": "input_json_delta", "partial_json": arguments}) if arguments else b"")

    def end(self, first: Choice) -> bytes:
        stopped = _event("content_block_stop", index=0) if self._open else b""
        reason, sequence = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        ended = _event("message_delta", delta=delta, usage=self._usage())
        return stopped + ended + _event("message_stop")

    def whole(self) -> Any:
        reason, sequence = self._stop_reason()
        answer = {**self._message([self._block()]), "stop_reason": reason, "stop_sequence": sequence}
        answer["usage"] = self._usage()
        # vLLM leaves out what is null here, though not in a stream.
        return {key: value for key, value in answer.items() if value is not None}

    def error_event(self, error: ApiError) -> bytes:
        return named_event("error", error.messages_body())

    def _message(self, content: list[Any]) -> dict[str, Any]:
        model = self._reply.generation.model
        return {"id": self._reply.id, "type": "message", "role": "assistant", "content": content, "model": model}

    def _block(self) -> dict[str, Any]:
        if self._call is None:
            return {"type": "text", "text": self._choice.whole_text()}
        return {"type": "tool_use", "id": self._call.id, "name": self._call.name, "input": self._input()}

    def _input(self) -> Any:
        assert self._call is not None
        # Arguments that were cut short are no JSON.
        return {} if self._is_cut() else json.loads(self._call.arguments)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self._started() + _event("content_block_delta", index=0, delta=delta)

    def _started(self) -> bytes:
        if self._open:
            return b""
        self._open = True
        block = {"type": "text", "text": ""} if self._call is None else {**self._block(), "input": {}}
        return _event("content_block_start", index=0, content_block=block)

    def _is_cut(self) -> bool:
        return self._choice.request.finish_reason != "stop"

    def _stop_reason(self) -> tuple[str | None, str | None]:
        match self._choice.request.finish_reason:
            case "length":
                return "max_tokens", None
            case "stop" if self._call is not None:
                return "tool_use", None
            case "stop":
                text = self._choice.stop_reason
                return ("end_turn", None) if text is None else ("stop_sequence", text)
            case _:
                return None, None

    def _usage(self) -> dict[str, int]:
        """Anthropic's: the three kinds of input add up to the prompt."""
        cached, created = cached_and_created(self._choice)
        return {
            "input_tokens": max(0, self._reply.num_prompt - cached - created),
            "output_tokens": self._reply.num_generated,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
