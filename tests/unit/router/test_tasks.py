import asyncio
import socket
import time

import pytest

from router.tasks import end, others_timeout


async def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 3


async def test_what_is_over_or_never_began_needs_no_ending() -> None:
    await end(None)
    await end(asyncio.create_task(asyncio.sleep(0)))


async def test_what_arrived_while_our_own_loop_was_late_is_in_time() -> None:
    here, there = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)

    def late() -> None:
        time.sleep(0.3)
        there.send(b"x")

    with there:
        async with others_timeout(0.2):
            asyncio.get_running_loop().call_soon(late)
            assert await reader.read(1) == b"x"
    writer.close()
    await writer.wait_closed()


async def test_what_never_arrives_is_waited_for_only_so_long() -> None:
    with pytest.raises(TimeoutError):
        async with others_timeout(0.01):
            await asyncio.Event().wait()
    with pytest.raises(ZeroDivisionError):
        async with others_timeout(0.0):
            raise ZeroDivisionError
    await asyncio.sleep(0.01)  # nothing of them is left that could go wrong later
