"""KV events on ZeroMQ, as vLLM sends them: a PUB socket for the stream and a ROUTER socket for replays.

PUB      [topic, seq (8 bytes, big-endian, from 0), msgpack [ts, [event, ...], data-parallel rank]]
ROUTER   a DEALER sends [b"", seq]; for each buffered batch from there on it gets [b"", topic, seq, payload],
         then [b"", b"", ff * 8, b""]
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from replicas.emulated.block_pool import KVEvent

BUFFER_STEPS = 10_000
_SEND_HIGH_WATER_MARK = 100_000
_END_SEQ = b"\xff" * 8
_SEQ_BYTES = 8


class EventPublisher:
    """Binds both sockets at once and needs a running event loop. Raises zmq.ZMQError for an endpoint it can't bind.

    `delay_s` is wall-clock seconds from `publish` to the wire (and into the replay buffer); the order is kept.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "kv-events", delay_s: float = 0.0
    ) -> None:
        self._topic = topic.encode()
        self._delay_s = delay_s
        self._seq = count()
        self._delayed: deque[bytes] = deque()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=BUFFER_STEPS)
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(_SEND_HIGH_WATER_MARK)
        self._replay: zmq.asyncio.Socket | None = None
        self._replay_task: asyncio.Task[None] | None = None
        try:
            self._pub.bind(endpoint)
            if replay_endpoint is not None:
                self._replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
                self._replay.bind(replay_endpoint)
                self._replay_task = asyncio.create_task(self._serve_replays(self._replay))
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """The bound address, with the port that port 0 or `*` stood for."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str | None:
        return None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Sequence[KVEvent]) -> None:
        payload = self._encode([time.time(), events, 0])
        if self._delay_s <= 0:
            self._send(payload)
            return
        # Timers may fire in any order; the queue keeps the batches in theirs.
        self._delayed.append(payload)
        asyncio.get_running_loop().call_later(self._delay_s, self._send_delayed)

    def close(self) -> None:
        if self._replay_task is not None:
            self._replay_task.cancel()
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    def _send_delayed(self) -> None:
        if not self._pub.closed:
            self._send(self._delayed.popleft())

    def _send(self, payload: bytes) -> None:
        seq = next(self._seq).to_bytes(_SEQ_BYTES, "big")
        self._buffer.append((seq, payload))
        self._pub.send_multipart([self._topic, seq, payload])

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != _SEQ_BYTES:
                continue
            client, start = frames[0], frames[2]
            # Big-endian: bytes compare as the numbers do. A copy, since batches arrive while a slow reader is served.
            for seq, payload in list(self._buffer):
                if seq >= start:
                    await self._reply(router, [client, b"", self._topic, seq, payload])
            await self._reply(router, [client, b"", b"", _END_SEQ, b""])

    async def _reply(self, router: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        # A client that has gone, or that reads slower than its high-water mark allows, loses messages, as with vLLM.
        with contextlib.suppress(zmq.ZMQError):
            await router.send_multipart(frames)
