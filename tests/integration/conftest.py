"""One live system for all tests that do it no harm: a Ray cluster takes half a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.live import Live, whohas_up


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """4 emulated replicas, 2 ingress processes; KV events arrive half a second late."""
    with whohas_up(tmp_path_factory.mktemp("live")) as running:
        yield running
