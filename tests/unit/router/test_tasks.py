import asyncio

from router.tasks import end


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
