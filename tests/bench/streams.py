"""A thousand streams at once through one ingress, whose clients leave when they like: is any byte lost, any memory?"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from router.ownership.redis import RedisOwnershipMap
from tests.bench import answers, client, processes, prompts
from tests.bench.overhead import LOADING_S
from tests.bench.report import Benchmark, Options, Table, load_average
from tests.bench.report import quantile as q
from tests.bench.stack import Stack, instant_stack

_GAP_MS = 800.0
_CHUNKS = (5, 60)
_LEAVING = 0.3
"""Share of the clients that go away at a random chunk, the zeroth (before the headers) included."""
_RAMP_S = 10.0
_ANSWER_S = 60.0


@dataclass(slots=True)
class Tally:
    """What became of the streams: `whole`, `left` on purpose, or what was wrong. `gaps_ms` between chunks."""

    ends: Counter[str] = field(default_factory=Counter)
    chunks: int = 0
    gaps_ms: list[float] = field(default_factory=list)


def run(options: Options) -> list[Table]:
    streams, seconds = options.times(1000, 200), float(options.times(120, 20))
    with instant_stack(with_trivial=False) as stack:
        time.sleep(LOADING_S)
        return asyncio.run(_measure(stack, streams, seconds))


async def _measure(stack: Stack, streams: int, seconds: float) -> list[Table]:
    pid, load = stack.ingress_pid, load_average()
    await _drive(stack.whohas, streams, 15.0, Tally())  # memory that is taken once for so many connections
    await _free_after(stack)
    memory = [processes.rss_mb(pid)]
    tally = Tally()
    before = processes.read_cpu(stack.roots)
    driving = asyncio.create_task(_drive(stack.whohas, streams, seconds, tally))
    for _ in range(4):
        await asyncio.sleep(seconds / 4)
        memory.append(processes.rss_mb(pid))
    await driving
    cpu = processes.read_cpu(stack.roots).since(before)
    freed = await _free_after(stack)
    memory.append(processes.rss_mb(pid))
    wrong = sum(count for end, count in tally.ends.items() if end not in ("whole", "left"))
    rows: list[list[str | float]] = [
        ["streams at once", streams],
        ["streams that came to their end", tally.ends["whole"]],
        ["streams whose client left", tally.ends["left"]],
        ["chunks relayed and compared", tally.chunks],
        ["streams with a byte lost, doubled, out of order or in error", wrong],
        ["gap between chunks p50 (ms)", q(tally.gaps_ms, 0.5)],
        ["gap between chunks p99 (ms)", q(tally.gaps_ms, 0.99)],
        ["ingress CPU a chunk, starts and ends of streams included (ms)", cpu["ingress"] / tally.chunks * 1000],
        ["seconds until nothing was booked, running or in flight", freed],
        ["ingress RSS (MB): before, at each quarter, when all had ended", " ".join(f"{one:.1f}" for one in memory)],
    ]
    notes = [
        f"{seconds:.0f} s, a chunk every {_GAP_MS:.0f} ms, {_CHUNKS[0]} to {_CHUNKS[1]} a stream; load before {load}"
    ]
    notes += [f"{count} x {end}" for end, count in tally.ends.items() if end not in ("whole", "left")]
    return [Table(f"{streams:,} streams through one ingress", ["", ""], rows, notes)]


async def _drive(url: str, streams: int, seconds: float, tally: Tally) -> None:
    end = time.monotonic() + seconds

    async def one(i: int) -> None:
        draw = random.Random(i)
        await asyncio.sleep(min(_RAMP_S, seconds / 4) * i / streams)
        while time.monotonic() < end:
            chunks = draw.randint(*_CHUNKS)
            stays = chunks if draw.random() >= _LEAVING else draw.randint(0, chunks)
            mark = b"%d-%d" % (i, draw.randrange(1 << 40))
            try:
                async with asyncio.timeout(_ANSWER_S + chunks * _GAP_MS / 1000):
                    ended = await _stream(url, mark, chunks, stays, tally)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
                ended = f"{type(error).__name__}: {str(error)[:80]}"
            tally.ends[ended] += 1

    await asyncio.gather(*(one(i) for i in range(streams)))


async def _stream(url: str, mark: bytes, chunks: int, stays: int, tally: Tally) -> str:
    """One answer, compared with what the engine was to send. Leaves after `stays` chunks when that isn't all."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        body = prompts.body([{"role": "user", "content": f"stream {mark.decode()}"}])
        head = client.head(url, len(body), chunks, _GAP_MS, close=True)
        writer.write(head[:-2] + b"x-bench-mark: %b\r\n\r\n" % mark + body)
        if stays == 0:
            return "left"
        top = await reader.readuntil(b"\r\n\r\n")
        if not top.startswith(b"HTTP/1.1 200"):
            return f"status {top[9:12].decode()}"
        wanted = b"".join(answers.numbered(mark, i) for i in range(chunks)) + answers.DONE
        got, last = 0, time.perf_counter()
        while size := int(await reader.readuntil(b"\r\n"), 16):
            piece = (await reader.readexactly(size + 2))[:-2]
            if wanted[got : got + size] != piece:
                return "other bytes than the engine's"
            got += size
            now = time.perf_counter()
            tally.chunks += piece.count(b"\n\n")
            tally.gaps_ms.append((now - last) * 1000)
            last = now
            if stays < chunks and got >= len(wanted) * stays / chunks:
                return "left"
        return "whole" if got == len(wanted) else "bytes missing"
    finally:
        writer.transport.abort()


async def _free_after(stack: Stack) -> float:
    """Seconds until no ingress, no engine and no booking knows of a request any more."""
    began = time.monotonic()
    ownership = RedisOwnershipMap(stack.redis, prompts.MODEL, look_up_timeout_s=2.0)
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(120):
            while await _in_flight(http, stack) or await _booked(ownership):
                await asyncio.sleep(0.05)
    finally:
        await ownership.close()
    return time.monotonic() - began


async def _in_flight(http: aiohttp.ClientSession, stack: Stack) -> float:
    names = ("whohas_in_flight{", "vllm:num_requests_running")
    total = 0.0
    for url in (stack.up.url, *stack.engines):
        async with http.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))
    return total


async def _booked(ownership: RedisOwnershipMap) -> bool:
    return any(record.loads for record in (await ownership.look_up([])).routers.values())


BENCHMARK = Benchmark("streams", "a thousand streams through one ingress, with clients that leave: bytes, memory", run)
