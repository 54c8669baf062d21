"""One request: a replica is picked, has it, and if it fails before anything was answered, another one has it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from router.asked import Asked, Placement
from router.handover import with_token_ids
from router.router import Router
from router.tasks import end
from router.types import Decision, ReplicaId
from serve.asgi import Headers, HTTPError, Scope, Send, path_of
from serve.breaker import Breaker, Outcome
from serve.config import IngressSection
from serve.metrics import Metrics
from serve.relay import Answer, end_broken_stream, relay, request_headers, target
from serve.running import Candidate
from serve.upstream import Upstream, UpstreamFailed

_ATTEMPTS = 4
"""Replicas that are asked at most, where connecting fails. What an engine has seen is sent a second time at most."""
_FAREWELL_S = 5.0
_SERVER_FAULTS = (500, 502, 504)
_WHY = {
    "connect": "no replica could be reached",
    "sent": "the replica failed before it answered",
    "answer": "the replica failed while answering",
}

logger = logging.getLogger("whohas.ingress")


class Pick:
    """One choice among the replicas that run. What it books must be given back by `close`, however the request ends."""

    def __init__(
        self,
        router: Router,
        asked: Asked,
        usable: Callable[[Sequence[ReplicaId]], Sequence[ReplicaId]] = lambda candidates: candidates,
        *,
        book: bool,
    ) -> None:
        self._router = router
        self._asked = asked
        self._usable = usable
        self._book = book
        self._closed = False
        self.decision: Decision | None = None
        self.placement: Placement | None = None

    def choose(self, candidates: Sequence[ReplicaId]) -> ReplicaId:
        """The best of `candidates`, of which there must be one. Asked twice, it books once; asked too late, never."""
        wanted = self._usable(candidates)
        if self._book and self.placement is None and not self._closed:
            self.placement = self._router.place(self._asked, wanted)
            self.decision = self.placement.decision
            if self._closed:  # on another thread, just now
                self.close()
        else:
            self.decision = self._router.decide(self._asked, wanted)
        return self.decision.replica_id

    def close(self) -> None:
        self._closed = True
        if self.placement is not None:
            self._router.release(self.placement)


class Fleet(Protocol):
    """The replicas that run; Ray Serve's view of them, or a test's."""

    def candidates(self) -> Sequence[Candidate]:
        """As last heard; empty before the first pick was asked for."""

    async def pick(self, pick: Pick) -> Candidate:
        """What `pick.choose` says of those that run; waits while there is none."""


class AnswerBroken(Exception):
    """An answer that can't be brought to its end any more: the client's connection must be cut."""


class _Busy(Exception):
    """A healthy engine answered 503: it has no room, and another one may have."""


@dataclass(slots=True)
class _Job:
    """A request on its way. `resent`: an engine that had seen it failed it, and another one got it."""

    scope: Scope
    body: bytes
    send: Send
    asked: Asked
    generates: bool
    started: float
    headers: Headers
    answer: Answer = field(default_factory=Answer)
    tried: set[ReplicaId] = field(default_factory=set)
    resent: bool = False


class Dispatcher:
    """Needs a running event loop. `close` ends the probes of replicas that are left out."""

    def __init__(
        self, router: Router, fleet: Fleet, upstream: Upstream, metrics: Metrics, limits: IngressSection
    ) -> None:
        self._router = router
        self._fleet = fleet
        self._upstream = upstream
        self._metrics = metrics
        self._limits = limits
        self._breakers: dict[ReplicaId, Breaker] = {}
        self._probes: dict[ReplicaId, asyncio.Task[None]] = {}

    async def close(self) -> None:
        for probe in list(self._probes.values()):
            await end(probe)

    @property
    def left_out(self) -> list[ReplicaId]:
        """Replicas that get no requests just now because they failed."""
        return [replica for replica, breaker in self._breakers.items() if breaker.state == "open"]

    async def pick(self, pick: Pick, timeout_s: float | None = None) -> Candidate:
        """Raises HTTPError 503 when no replica runs in time."""
        try:
            async with asyncio.timeout(timeout_s or self._limits.no_replica_timeout_s):
                return await self._fleet.pick(pick)
        except TimeoutError as error:
            raise HTTPError(503, "no replica is ready yet", "service_unavailable", retry_after_s=5) from error

    def usable(self, candidates: Sequence[ReplicaId], tried: Collection[ReplicaId] = ()) -> list[ReplicaId]:
        """Awake, not left out, and none that this request has failed on; if there is none, the next best."""
        fresh = [one for one in candidates if one not in tried] or list(candidates)
        asleep = {record.replica_id for record in self._router.fleet.replicas.values() if record.asleep}
        awake = [one for one in fresh if one not in asleep] or fresh
        return [one for one in awake if (breaker := self._breakers.get(one)) is None or breaker.usable] or awake

    async def dispatch(
        self, scope: Scope, body: bytes, send: Send, asked: Asked, *, generates: bool, started: float
    ) -> None:
        """Answer the client: with an engine's answer, or by raising HTTPError before anything of one was sent.

        `generates`: the request is load, and is booked. `started`: `time.perf_counter()` of its arrival.
        """
        job = _Job(scope, body, send, asked, generates, started, request_headers(scope["headers"]))
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout(self._limits.total_timeout_s) as limit:
                await self._until_answered(job)
        except TimeoutError as error:
            if not limit.expired():
                raise
            await self._give_up(job, f"not finished after {self._limits.total_timeout_s:g} s", error, status=504)
        except asyncio.CancelledError:
            self._metrics.requests.labels("gone").inc()
            raise
        finally:
            self._metrics.in_flight.dec()

    async def _until_answered(self, job: _Job) -> None:
        while True:
            try:
                await self._attempt(job)
            except UpstreamFailed as error:
                if job.answer.status or not self._another(job, error):
                    await self._give_up(job, _WHY["answer" if job.answer.status else error.phase], error)
                    return
            except _Busy:
                job.resent = True
            else:
                self._metrics.requests.labels(job.answer.status).inc()
                return
            self._metrics.retries.inc()

    def _another(self, job: _Job, error: UpstreamFailed) -> bool:
        """May, and can, another replica have this request?"""
        if not self._untried(job):
            return False
        if error.phase == "connect":
            return len(job.tried) < _ATTEMPTS
        if job.resent or not self._limits.resend:
            return False
        job.resent = True
        return True

    def _untried(self, job: _Job) -> bool:
        return any(one.replica_id not in job.tried for one in self._fleet.candidates())

    async def _give_up(self, job: _Job, why: str, error: Exception, status: int = 502) -> None:
        if not job.answer.status:
            raise HTTPError(status, why, "upstream_error", retry_after_s=1) from error
        self._metrics.requests.labels("broken").inc()
        if not job.answer.stream:  # its length was promised: only a cut connection tells the client
            raise AnswerBroken(why) from error
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await end_broken_stream(job.send, path_of(job.scope), why)
        except TimeoutError:
            raise AnswerBroken(f"{why}, and the client does not read") from error

    async def _attempt(self, job: _Job) -> None:
        """One try at one replica. Raises `UpstreamFailed` or `_Busy`; nothing stays booked."""
        pick = Pick(self._router, job.asked, partial(self.usable, tried=job.tried), book=job.generates)
        try:
            candidate = await self.pick(pick)
            job.tried.add(candidate.replica_id)
            breaker = self._breakers.setdefault(candidate.replica_id, Breaker())
            trial = breaker.sent()
            outcome: Outcome = "neutral"
            try:
                outcome = await self._exchange(job, pick, candidate)
            except UpstreamFailed as error:
                logger.warning("replica %s failed: %s", candidate.replica_id, error)
                outcome = "lost"
                raise
            finally:
                if breaker.ended(outcome, trial=trial):
                    self._probe(candidate)
        finally:
            pick.close()

    async def _exchange(self, job: _Job, pick: Pick, candidate: Candidate) -> Outcome:
        decision, placement = pick.decision, pick.placement
        assert decision is not None
        if placement is not None:
            self._metrics.decided(decision, job.asked, time.perf_counter() - job.started)

        def on_first_chunk() -> None:
            self._metrics.first_byte.observe(time.perf_counter() - job.started)
            if placement is not None:
                self._router.first_token(placement)

        request = self._upstream.request(
            candidate.url,
            job.scope["method"],
            target(job.scope),
            candidate.pin(job.headers),
            with_token_ids(job.body, placement.token_ids if placement is not None else b""),
            resend=self._limits.resend or not job.generates,
        )
        async with request as response:
            if response.status >= 500:
                await self._judge(job, response.status, candidate.url)
            response.fail_when_silent(self._limits.idle_timeout_s)
            await relay(response, job.send, job.answer, decision_headers(decision), on_first_chunk)
        if placement is not None and job.answer.cached_tokens is not None:
            cached = job.answer.cached_tokens
            self._metrics.observe_prediction(decision.replica_id, decision.predicted_cached_tokens, cached)
            self._router.observe(placement, cached)
        if response.status < 400:
            return "ok"
        return "error" if response.status in _SERVER_FAULTS else "neutral"

    async def _judge(self, job: _Job, status: int, url: str) -> None:
        """An error of a healthy engine is the client's to see, that of a dying one is not; and 503 means busy."""
        if not await self._upstream.healthy(url):
            raise UpstreamFailed(f"status {status} from an engine that is not healthy", "sent")
        if status == 503 and not job.resent and self._untried(job):
            raise _Busy

    def _probe(self, candidate: Candidate) -> None:
        logger.warning("replica %s is left out until /health says 200 again", candidate.replica_id)
        task = asyncio.create_task(self._keep_probing(candidate), name="whohas-probe")
        self._probes[candidate.replica_id] = task
        task.add_done_callback(lambda _: self._probes.pop(candidate.replica_id, None))

    async def _keep_probing(self, candidate: Candidate) -> None:
        """Until it is healthy, or Ray Serve has dropped it."""
        breaker = self._breakers[candidate.replica_id]
        while breaker.state == "open":
            await asyncio.sleep(breaker.pause_s)
            known = {one.replica_id for one in self._fleet.candidates()}
            for gone in self._breakers.keys() - known:
                del self._breakers[gone]
            if candidate.replica_id not in known:
                return
            breaker.probed(healthy=await self._upstream.healthy(candidate.url))
        logger.info("replica %s is healthy again", candidate.replica_id)


def decision_headers(decision: Decision) -> Headers:
    return [
        (b"x-whohas-replica", decision.replica_id.encode()),
        (b"x-whohas-predicted-cached-tokens", b"%d" % decision.predicted_cached_tokens),
    ]
