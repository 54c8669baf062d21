"""The replicas that Ray Serve says are running, as the processes with a handle to them last heard.

A module of its own: Serve pickles `serve.request_router` by value, so what lives there is not shared within a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replicas.engine_api import pinned
from router.types import ReplicaId
from serve.asgi import Headers

if TYPE_CHECKING:
    from ray.serve.request_router import RunningReplica

_running: dict[tuple[str, str], Sequence[RunningReplica]] = {}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running replica: its id, the base URL of its engine's HTTP server, and, where that has several data-parallel
    ranks, the one that this replica is."""

    replica_id: ReplicaId
    url: str
    dp_rank: int | None = None

    def pin(self, headers: Headers) -> Headers:
        """The headers of a request to this replica."""
        if self.dp_rank is None:
            return headers
        pins = [(key.encode(), value.encode()) for key, value in pinned(self.dp_rank).items()]
        names = {key for key, _ in pins}
        return [*(pair for pair in headers if pair[0].lower() not in names), *pins]


def update(app: str, deployment: str, replicas: Sequence[RunningReplica]) -> None:
    _running[app, deployment] = replicas


def candidates(app: str, deployment: str) -> list[Candidate]:
    """Those that are ready; empty before the first pick was asked for."""
    known = _running.get((app, deployment), ())
    return [candidate_of(one.replica_id.unique_id, one.replica_metadata) for one in known if one.replica_metadata]


def candidate_of(replica_id: str, metadata: Mapping[str, Any]) -> Candidate:
    return Candidate(ReplicaId(replica_id), str(metadata["url"]), metadata.get("dp_rank"))
