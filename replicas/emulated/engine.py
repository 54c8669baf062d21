"""One engine in time: drives a scheduler by an event loop. No HTTP, no sockets; many fit into one process.

Times inside are simulated seconds, `speed` of them to a second of the loop's clock. Steps follow one another on the
simulated timeline, not on the loop's: what the process loses on a busy machine in one step it makes up in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from replicas.emulated.block_pool import KVEvent
from replicas.emulated.figures import EngineFigures, Tracked
from replicas.emulated.scheduler import EngineRequest, Scheduler, State
from replicas.emulated.step_time import StepTime, StepWork

OnToken = Callable[[EngineRequest], None]
"""Called after each token of a request, and once more with `State.ABORTED` when the engine ends it early itself."""


class Engine:
    """Needs a running event loop. `publish` gets each step's KV events when the step ends, as with vLLM.

    `step_end`: the simulated time at which the last step ended or the running one will. `on_step` may be set to be told
    how late each step ended, in seconds of the wall clock.
    """

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
        self.figures = EngineFigures(scheduler.stats, step_time)
        self.stopped = False
        self.sleep_level: int | None = None
        self.step_end = 0.0
        self.on_step: Callable[[float], None] | None = None
        self._publish = publish
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._sinks: dict[EngineRequest, tuple[OnToken, Tracked]] = {}
        self._step: tuple[StepWork, float] | None = None
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
        self._sinks[request] = on_token, Tracked()
        self._begin_if_idle(request.arrival)

    def abort(self, request: EngineRequest) -> None:
        """Ends a request, its blocks free at once, and calls its `on_token` no more. Harmless when it has ended."""
        self._sinks.pop(request, None)
        self.scheduler.abort(request)

    def sleep(self, level: int, *, keep_running: bool = False) -> None:
        """Ends what runs, or interrupts it, empties the cache from level 1 on and computes nothing until it is woken.

        What comes meanwhile is queued. As with vLLM the event that tells of the empty cache goes out with the first
        step after waking.
        """
        self.sleep_level = level
        if not keep_running:
            self._abort_all()
        if level == 0:
            return  # the step that runs is the last one
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None  # the step's tokens are lost with it
        self.scheduler.reset_prefix_cache(preempt_running=True)

    def wake_up(self) -> None:
        self.sleep_level = None
        self._begin_if_idle(self.now())

    def stop(self) -> None:
        """Aborts everything and tells those who wait."""
        self.stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._abort_all()

    def _abort_all(self) -> None:
        sinks, self._sinks = self._sinks, {}
        for request, (on_token, _) in sinks.items():
            self.scheduler.abort(request)
            on_token(request)

    def _begin_if_idle(self, now: float) -> None:
        if self._timer is None and self.sleep_level is None:
            self._begin(max(self.step_end, now))

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
        seconds = self.step_time.seconds(work)
        self._step = work, seconds
        self.step_end = start + seconds
        self._timer = self._loop.call_at(self._origin + self.step_end / self._speed, self._end)

    def _end(self) -> None:
        now, figures = self.step_end, self.figures
        lag_s = self._loop.time() - self._origin - now / self._speed
        if self._step is not None:
            figures.step_ended(now, *self._step, lag_s)
        if self.on_step is not None:
            self.on_step(lag_s)
        produced = self.scheduler.finish(now)
        events = self.scheduler.pool.take_events()
        if events:
            self._publish(events)
        for request in produced:
            sink = self._sinks.get(request)
            if sink is None:
                continue
            on_token, tracked = sink
            figures.token_generated(request, tracked, now)
            if request.state is State.FINISHED:
                del self._sinks[request]
            on_token(request)
        if self.stopped or self.sleep_level is not None:
            self._timer = None
        else:
            self._begin(now)
