"""Work beside the event loop: few threads, there from the start."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from router.workers import Workers


async def test_the_threads_are_there_before_the_first_call_and_no_more_come() -> None:
    others = set(threading.enumerate())  # of which some may end meanwhile
    workers = Workers(2)
    workers.start()
    there = set(threading.enumerate()) - others
    assert len(there) == 2
    await asyncio.gather(*(workers.run(lambda: None) for _ in range(20)))
    assert set(threading.enumerate()) - others == there
    workers.close()


def test_no_thread_waits_for_another_that_was_ended_before_it_began() -> None:
    others = set(threading.enumerate())
    workers = Workers(2)
    workers._threads.submit(workers._met.wait, 600)
    (waiting,) = set(threading.enumerate()) - others
    workers.close()
    waiting.join(60)
    assert not waiting.is_alive()


async def test_a_call_gets_its_arguments_and_context_and_its_error_comes_back() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("seen")
    workers = Workers(1)
    assert await workers.run(lambda *args, **kwargs: (args, kwargs, variable.get()), 1, b=2) == ((1,), {"b": 2}, "seen")
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 1, 0)
    workers.close()


async def test_the_loop_runs_on_while_threads_are_busy_and_a_cancelled_call_never_begins() -> None:
    workers, go, begun = Workers(1), threading.Event(), []
    workers.start()
    first = asyncio.create_task(workers.run(go.wait, 60))
    second = asyncio.create_task(workers.run(lambda: begun.append("second")))
    await asyncio.sleep(0.05)
    assert not first.done()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()
    assert await first
    await workers.run(lambda: None)
    assert begun == []
    workers.close()
