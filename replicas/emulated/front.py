"""What every request passes before the handlers: request ids are echoed, and work in hand is counted for /load."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "x-request-id"

# Those that vLLM counts, as far as they are served here.
_COUNTED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
)


class Front:
    """An ASGI application around another one. `server_load` is how many counted requests are being answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.server_load = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(REQUEST_ID_HEADER) or uuid.uuid4().hex
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        header = (REQUEST_ID_HEADER.encode(), request_id.encode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            await send(message)

        counted = scope["path"] in _COUNTED_PATHS
        self.server_load += counted
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self.server_load -= counted
