"""vLLM's KV-event publisher, with losses, silence and restarts on demand."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

DEADLINE_S = 60
END = b"\xff" * 8


def batch(seq: int, engine: int = 1) -> bytes:
    """A batch that removes a block named by its own number."""
    return msgspec.msgpack.encode(
        [float(engine), [{"type": "BlockRemoved", "block_hashes": [seq], "medium": "GPU"}], 0]
    )


class Publisher:
    """vLLM's publisher as far as a subscriber can see it. Call `publish` from the event loop."""

    def __init__(
        self, events: str, replay: str | None = None, *, with_topic: bool = True, silent: bool = False
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # tell of every subscriber, also while one that has gone still counts
        self._pub.bind(events)
        self._with_topic, self.silent = with_topic, silent
        self.questions: list[int] = []
        self.may_end = asyncio.Event()  # an answer waits for it before its last message
        self.may_end.set()
        self.buffer: list[tuple[int, bytes]] = []
        self._task: asyncio.Task[None] | None = None
        if replay is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self._router.bind(replay)
            self._task = asyncio.create_task(self._answer())

    async def publish(self, seq: int, *, lose: bool = False, payload: bytes | None = None) -> None:
        payload = batch(seq) if payload is None else payload
        self.buffer.append((seq, payload))
        if not lose:
            await self._pub.send_multipart([b"kv-events", seq.to_bytes(8, "big"), payload])

    async def subscribed(self) -> None:
        """Returns once somebody has subscribed, so that nothing sent from now on is lost by being early."""
        async with asyncio.timeout(DEADLINE_S):
            while not (await self._pub.recv()).startswith(b"\x01"):
                pass

    async def _answer(self) -> None:
        while True:
            self._client, _, start = await self._router.recv_multipart()
            self.questions.append(int.from_bytes(start, "big"))
            if not self.silent:
                await self.answer_again(self.buffer[-1][0] if self.buffer else 0)

    async def answer_again(self, upto: int) -> None:
        """Answer the last question with what the buffer has up to this number."""
        topic, start = [b"kv-events"] if self._with_topic else [], self.questions[-1]
        for seq, payload in self.buffer:
            if start <= seq <= upto:
                await self._router.send_multipart([self._client, b"", *topic, seq.to_bytes(8, "big"), payload])
        await self.may_end.wait()
        await self._router.send_multipart([self._client, b"", *topic, END, b""])

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._context.destroy(linger=0)
