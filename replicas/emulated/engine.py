"""One engine in time: drives a scheduler by an event loop. No HTTP, no sockets; many fit into one process.

Times inside are simulated seconds, `speed` of them to a second of the loop's clock. Steps follow one another on the
simulated timeline, not on the loop's: what the process loses on a busy machine in one step it makes up in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from replicas.emulated.block_pool import KVEvent
from replicas.emulated.scheduler import EngineRequest, Scheduler, State
from replicas.emulated.step_time import StepTime

OnToken = Callable[[EngineRequest], None]
"""Called after each token of a request, and once more with `State.ABORTED` when the engine stops before its end."""


class Engine:
    """Needs a running event loop. `publish` gets each step's KV events when the step ends, as with vLLM."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_time: StepTime,
        *,
        publish: Callable[[list[KVEvent]], None] = lambda events: None,
        speed: float = 1.0,
    ) -> None:
        if not speed > 0:
            raise ValueError(f"speed must be above 0, not {speed}")
        self.scheduler = scheduler
        self.step_time = step_time
        self.stopped = False
        self._publish = publish
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._sinks: dict[EngineRequest, OnToken] = {}
        self._step_end = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Simulated seconds since the engine was made."""
        return (self._loop.time() - self._origin) * self._speed

    def submit(self, request: EngineRequest, on_token: OnToken) -> None:
        """Queues a request as of now.

        Raises ValueError for one that could never be served, RuntimeError once the engine has stopped.
        """
        if self.stopped:
            raise RuntimeError("the engine has stopped")
        request.arrival = self.now()
        self.scheduler.add(request)
        self._sinks[request] = on_token
        if self._timer is None:
            self._begin(max(self._step_end, request.arrival))

    def abort(self, request: EngineRequest) -> None:
        """Ends a request, its blocks free at once, and calls its `on_token` no more. Harmless when it has ended."""
        self._sinks.pop(request, None)
        self.scheduler.abort(request)

    def stop(self) -> None:
        """Aborts everything and tells those who wait."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sinks, self._sinks = self._sinks, {}
        for request, on_token in sinks.items():
            self.scheduler.abort(request)
            on_token(request)

    def _begin(self, start: float) -> None:
        self._timer = None
        work = self.scheduler.schedule(start)
        if work is None:
            arrival = self.scheduler.next_arrival()
            if arrival is None:
                return
            # Only after a lag: the queue's head came after this nominal time, while nothing else was there to run.
            start = max(start, arrival)
            work = self.scheduler.schedule(start)
            if work is None:
                return
        self._step_end = start + self.step_time.seconds(work)
        self._timer = self._loop.call_at(self._origin + self._step_end / self._speed, self._end)

    def _end(self) -> None:
        produced = self.scheduler.finish(self._step_end)
        events = self.scheduler.pool.take_events()
        if events:
            self._publish(events)
        for request in produced:
            on_token = self._sinks.get(request)
            if request.state is State.FINISHED:
                self._sinks.pop(request, None)
            if on_token is not None:
                on_token(request)
        if not self.stopped:
            self._begin(self._step_end)
