"""The few errors of the read path. They carry data; only the edge turns them into HTTP."""

from __future__ import annotations


class RouterError(Exception):
    """Base of everything below."""


class InvalidRequest(RouterError):
    """The body can't be a request to the engine: the client's mistake, an HTTP 400.

    `param` names the offending field in OpenAI's error shape.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownPrompt(RouterError):
    """The body may be fine, but its token ids can't be told here; such a request is routed by load alone.

    `reason` is a short fixed word for metrics, e.g. "multimodal" or "template".
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class OwnershipUnavailable(RouterError):
    """Redis did not answer in time, refused, or answered nonsense. Callers go on from load."""


class OwnershipFull(OwnershipUnavailable):
    """The store has no memory for what was to be added; everything else is done. What it holds goes on to count."""


class Fenced(RouterError):
    """This member's lease ended, a newer incarnation took its place, or the store lost some of its writes: nothing was
    written. Join again."""

    def __init__(self, member: str) -> None:
        super().__init__(f"{member} no longer holds its lease")
        self.member = member


class ModelNotFound(RouterError):
    """No tokenizer files for the model; the message says what to do."""
