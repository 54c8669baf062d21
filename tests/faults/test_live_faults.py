"""Kills and stalls against the whole application, with a seed."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from tests.faults import live
from tests.integration.live import MODEL, WHOHAS, whohas_up

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


async def test_the_whole_application_survives_kills_and_stalls_of_each_of_its_parts(tmp_path: Path) -> None:
    with whohas_up(tmp_path) as running:
        told = await live.survive(running, seed=1, seconds=10.0)
        assert sorted(told.faults) == sorted(live.FAULTS)
        assert told.outcomes["complete"] > 0
        command = [WHOHAS, "map", "--check", "--redis", running.redis, "--fleet", MODEL]
        checked = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
