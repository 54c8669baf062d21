"""The replicas that Ray Serve says are running, as the processes with a handle to them last heard.

A module of its own: Serve pickles `serve.request_router` by value, so what lives there is not shared within a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.types import ReplicaId

if TYPE_CHECKING:
    from ray.serve.request_router import RunningReplica

_running: dict[tuple[str, str], Sequence[RunningReplica]] = {}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running replica: its id and the base URL of its engine's HTTP server."""

    replica_id: ReplicaId
    url: str


def update(app: str, deployment: str, replicas: Sequence[RunningReplica]) -> None:
    _running[app, deployment] = replicas


def candidates(app: str, deployment: str) -> list[Candidate]:
    """Those that are ready; empty before the first pick was asked for."""
    known = _running.get((app, deployment), ())
    return [candidate_of(one.replica_id.unique_id, one.replica_metadata) for one in known if one.replica_metadata]


def candidate_of(replica_id: str, metadata: Mapping[str, Any]) -> Candidate:
    return Candidate(ReplicaId(replica_id), str(metadata["url"]))
