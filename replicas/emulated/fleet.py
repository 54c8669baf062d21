"""Many engines in one process and on one event loop, without HTTP: for simulations and for tests of policies.

    fleet = Fleet(8, speed=10.0)
    served = await fleet.serve(3, token_ids, num_output=20)     # on replica 3, as if it had come by HTTP
    served.cached_tokens, served.ttft_s

Every engine has its own pool, scheduler and block hashes; nothing is shared but the process. With a `speed` above what
the machine can follow, steps end late by the wall clock (`Engine.figures.lag_s`), never by the simulated one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat

from replicas.emulated.block_hashes import BlockChain, CacheKeys
from replicas.emulated.block_pool import BlockPool, KVEvent
from replicas.emulated.engine import Engine
from replicas.emulated.scheduler import EngineRequest, Scheduler, SchedulerConfig, State
from replicas.emulated.step_time import DEFAULT_PROFILE, StepTime, load_profile

OnEvents = Callable[[int, list[KVEvent]], None]
"""Replica number, and the KV events of one of its steps."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request that ended; times in simulated seconds from its arrival."""

    replica: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float


class Fleet:
    """Needs a running event loop. `num_blocks` of `block_size` tokens for each replica; `speed` as for `Engine`.

    `on_events` None: no events are made, which is cheaper.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        num_blocks: int = 20_000,
        block_size: int = 16,
        scheduler: SchedulerConfig | None = None,
        step_time: StepTime | None = None,
        speed: float = 1.0,
        on_events: OnEvents | None = None,
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"a fleet has at least 1 replica, not {num_replicas}")
        self._block_size = block_size
        self._ids = count()
        profile = step_time or load_profile(DEFAULT_PROFILE)
        self.engines: list[Engine] = []
        for replica in range(num_replicas):
            pool = BlockPool(num_blocks, block_size, events=on_events is not None)
            publish = partial(on_events, replica) if on_events is not None else _nobody_listens
            self.engines.append(Engine(Scheduler(pool, scheduler), profile, publish=publish, speed=speed))

    async def serve(
        self,
        replica: int,
        token_ids: Iterable[int],
        num_output: int,
        *,
        output: Iterator[int] | None = None,
        keys: CacheKeys | None = None,
        priority: int = 0,
        on_first_token: Callable[[], None] | None = None,
    ) -> Served:
        """Runs one request to its end; cancelling aborts it. `output` yields the ids to generate, by default zeros.

        Raises ValueError for what the replica could never hold, RuntimeError when the fleet stops meanwhile.
        """
        engine = self.engines[replica]
        request = EngineRequest(
            request_id=f"request-{next(self._ids)}",
            # The replica is the seed, so that engines don't know each other's hashes.
            chain=BlockChain(token_ids, self._block_size, keys, replica),
            num_output=num_output,
            output=output or repeat(0),
            priority=priority,
        )
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def on_token(one: EngineRequest) -> None:
            if on_first_token is not None and one.num_generated == 1 and one.state is not State.ABORTED:
                on_first_token()
            if one.state is not State.RUNNING and not ended.done():
                ended.set_result(engine.step_end)

        engine.submit(request, on_token)
        try:
            end = await ended
        except asyncio.CancelledError:
            engine.abort(request)
            raise
        if request.state is State.ABORTED:
            raise RuntimeError("the engine ended the request before it was complete")
        assert request.first_token_at is not None
        return Served(
            replica,
            request.num_prompt,
            request.cached_tokens or 0,
            request.num_generated,
            request.first_token_at - request.arrival,
            end - request.arrival,
        )

    def stop(self) -> None:
        """Ends everything; `serve` calls that wait raise RuntimeError."""
        for engine in self.engines:
            engine.stop()


def _nobody_listens(events: list[KVEvent]) -> None:
    pass
