"""The pick, made through Ray Serve: our ranking inside Serve's own view of who is running.

Ray Serve keeps one `PrefixRequestRouter` in every process that holds a handle to the replicas, and asks it for each
request. The request's argument is a `Pick`, an object of this very process; nothing of it is ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router.types import ReplicaId
from serve import running


class Pick(Protocol):
    """Chooses among the replicas that Serve says are running."""

    def choose(self, candidates: Sequence[ReplicaId]) -> ReplicaId: ...


class PrefixRequestRouter(RequestRouter):
    """Adapter only: policies live in `router/`, where they can be read and tested without Ray."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        running.update(self._deployment_id.app_name, self._deployment_id.name, replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without this an empty answer makes Serve ask again at once and for ever, and the loop never yields.
        pending_request.routing_context.should_backoff = True
        pick = pending_request.args[0] if pending_request.args else None
        choose = getattr(pick, "choose", None)
        if choose is None:  # a plain method call on the handle: any replica will do
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas if replica.replica_metadata}
        if not by_id:
            return []
        return [[by_id[choose(list(by_id))]]]
