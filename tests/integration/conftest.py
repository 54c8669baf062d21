"""One live system for all tests that do it no harm: a Ray cluster takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.live import Live, whohas_up


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """4 emulated replicas, 2 ingress processes; KV events arrive half a second late."""
    # Nothing is killed here: no lease may lapse either because some process had to wait for its turn.
    router = {"look_up_timeout_s": 2.0, "lease_s": 6.0}
    with whohas_up(tmp_path_factory.mktemp("live"), router=router) as running:
        yield running
