"""One engine's KV-event stream over ZMQ, in order and each batch once.

Live messages come from a PUB socket as [topic, seq, payload]; missing ones are asked for at a ROUTER with
[empty, first seq] and come as [empty, topic, seq, payload] (without the topic in older vLLM), the last one numbered -1.
`seq` is 8 bytes, big-endian. Source: vllm/distributed/kv_events.py, ZmqEventPublisher.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from replicas.events import DecodeError, KVEventBatch, decode_batch
from replicas.sequence import AskReplay, Deliver, Lost, Restarted, SequenceTracker, Step

logger = logging.getLogger(__name__)

_SEQ_BYTES = 8
_END = -1
# The publisher answers a replay in one go: less room than twice its buffer (10,000 by default) loses the end of it.
_RECEIVE_HIGH_WATER = 100_000
_BURST_S = 0.005


@dataclass(frozen=True, slots=True)
class Batch:
    seq: int
    events: KVEventBatch


Item = Batch | Restarted | Lost


class Subscriber:
    """`async with Subscriber(...) as items: async for item in items: ...`

    `events`, `replay`: ZMQ endpoints of the publisher; without `replay` every gap is a `Lost`. A replay that is silent
    for `replay_timeout_s` is asked again over a new socket. After `probe_s` without a message the stream's end is
    checked. An undecodable message is a `Lost` too, as it may have told of removals.
    """

    def __init__(
        self,
        events: str,
        replay: str | None = None,
        *,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        probe_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tracker = SequenceTracker(can_replay=replay is not None)
        self._events, self._replay, self._topic = events, replay, topic
        self._replay_timeout_s, self._probe_s, self._clock = replay_timeout_s, probe_s, clock
        self._context = zmq.Context()
        self._poller = zmq.asyncio.Poller()
        self._sub: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._connections = 0
        self._arrived: list[bytes] | None = None  # a live message that was received and not looked at yet
        self.on_doubt: Callable[[], None] = lambda: None  # called where `tracker.in_doubt` has changed
        self._quiet_since = self._answer_since = clock()

    @property
    def counters(self) -> Counter[str]:
        """The tracker's, and: malformed, undecodable messages; reconnects."""
        return self.tracker.counters

    @property
    def seq(self) -> int:
        """Last message taken, -1 where there is none."""
        return self.tracker.seq

    @property
    def caught_up(self) -> bool:
        """No replay is running or due."""
        return self._sub is not None and not self.tracker.replaying

    async def __aenter__(self) -> AsyncIterator[Item]:
        return self._items()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for socket in (self._monitor, self._sub, self._dealer):
            if socket is not None:
                socket.close(linger=0)
        self._sub = self._monitor = self._dealer = None
        self._context.destroy(linger=0)

    async def _items(self) -> AsyncIterator[Item]:
        sub, monitor = self._subscribe()
        self._sub, self._monitor = sub, monitor
        for item in self._perform(self.tracker.start()):
            yield item
        while True:
            doubted = self.tracker.in_doubt
            await self._poller.poll(self._wait_ms())
            burst_ends = self._clock() + _BURST_S
            steps = self._receive_any(sub, monitor)
            if steps is None:  # only now: where this process was late, what had arrived by then is in time
                for item in self._check_time():
                    yield item
            while steps is not None:
                for item in self._perform(steps):
                    yield item
                steps = self._receive_any(sub, monitor) if self._clock() < burst_ends else None
            if self.tracker.in_doubt != doubted:
                self.on_doubt()
            await asyncio.sleep(0)  # a poll that finds something doesn't let others run

    # --- sockets ----------------------------------------------------------------------------------------------------

    def _subscribe(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        sub: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        sub.setsockopt(zmq.RECONNECT_IVL, 50)
        sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        sub.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        monitor: zmq.Socket[bytes] = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.connect(self._events)
        self._poller.register(sub, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return sub, monitor

    def _ask(self, question: AskReplay) -> None:
        if question.fresh and self._dealer is not None:
            self._poller.unregister(self._dealer)
            self._dealer.close(linger=0)
            self._dealer = None
        if self._dealer is None:
            assert self._replay is not None
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
            self._dealer.connect(self._replay)
            self._poller.register(self._dealer, zmq.POLLIN)
        self._answer_since = self._clock()
        try:
            self._dealer.send_multipart([b"", question.start.to_bytes(_SEQ_BYTES, "big")], zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("the replay socket at %s takes no question", self._replay)

    def _receive_any(self, sub: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> Sequence[Step] | None:
        """Steps for the next message of any socket; None where there is none."""
        if self._arrived is None:  # before the monitor is asked: no message may overtake the news of its own connection
            self._arrived = _receive(sub)
        try:
            recv_monitor_message(monitor, zmq.NOBLOCK)
        except zmq.Again:
            pass
        else:
            self._connections += 1
            if self._connections == 1:
                return ()
            self.counters["reconnects"] += 1
            return self.tracker.reconnected()
        if self._dealer is not None and (frames := _receive(self._dealer)) is not None:
            self._answer_since = self._clock()
            return self._on_replayed(frames)
        live, self._arrived = self._arrived, None
        if live is None:
            return None
        self._quiet_since = self._clock()
        return self._on_live(live)

    def _on_live(self, frames: Sequence[bytes]) -> Sequence[Step]:
        if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
            self.counters["malformed"] += 1
            return ()
        return self.tracker.live(int.from_bytes(frames[-2], "big"), frames[-1])

    def _on_replayed(self, frames: Sequence[bytes]) -> Sequence[Step]:
        if len(frames) < 2 or len(frames[-2]) != _SEQ_BYTES:
            self.counters["malformed"] += 1
            return ()
        seq = int.from_bytes(frames[-2], "big", signed=True)
        return self.tracker.replay_ended() if seq == _END else self.tracker.replayed(seq, frames[-1])

    # --- steps and time ---------------------------------------------------------------------------------------------

    def _perform(self, steps: Sequence[Step]) -> Iterator[Item]:
        for step in steps:
            if isinstance(step, AskReplay):
                self._ask(step)
            elif isinstance(step, Deliver):
                try:
                    yield Batch(step.seq, decode_batch(step.payload))
                except DecodeError as error:
                    self.counters["undecodable"] += 1
                    logger.warning("message %d of %s: %s", step.seq, self._events, error)
                    yield Lost(f"message {step.seq} can't be decoded")
            else:
                yield step

    def _check_time(self) -> Iterator[Item]:
        now = self._clock()
        if self.tracker.replaying:
            if now - self._answer_since >= self._replay_timeout_s:
                yield from self._perform(self.tracker.replay_timed_out())
        elif now - self._quiet_since >= self._probe_s:
            self._quiet_since = now
            yield from self._perform(self.tracker.probe())

    def _wait_ms(self) -> int:
        if self._arrived is not None:
            return 0
        since, limit = (
            (self._answer_since, self._replay_timeout_s)
            if self.tracker.replaying
            else (self._quiet_since, self._probe_s)
        )
        return max(0, int((since + limit - self._clock()) * 1000)) + 1


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
