"""Answers other than 200, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault, `kind` is the error's type, by default the usual."""

    def __init__(self, status: int, message: str, param: str | None = None, *, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _KINDS.get(status, "InternalServerError")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}

    def messages_body(self) -> dict[str, Any]:
        """The same in the shape of the Messages API."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
