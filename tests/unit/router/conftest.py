from __future__ import annotations

import pytest

from tests.unit.router.one_router import Clock, FlakyMap


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ownership(clock: Clock) -> FlakyMap:
    return FlakyMap(clock)
