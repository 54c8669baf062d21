"""The embedded server: up, alone, and gone when its owner is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from redis import Redis

from replicas.ports import quiet_port
from serve.embedded_valkey import EmbeddedValkey, EmbeddedValkeyError

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
OWNER = """
import time
from serve.embedded_valkey import EmbeddedValkey
valkey = EmbeddedValkey()
valkey.start()
print(valkey.pid, valkey.url, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status not in "ZX"


def test_it_serves_functions_and_keeps_nothing() -> None:
    with EmbeddedValkey() as valkey, Redis.from_url(valkey.url) as client:
        assert client.ping()
        client.function_load("#!lua name=t\nserver.register_function('f', function() return 7 end)")
        assert client.fcall("f", 0) == 7
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("maxmemory") == {"maxmemory": "0"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        folder, pid = Path(client.config_get("dir")["dir"]), valkey.pid
    assert pid is not None
    assert not is_alive(pid)
    assert not folder.exists()


def test_it_takes_the_given_port_and_settings_and_starts_again() -> None:
    port = quiet_port()
    valkey = EmbeddedValkey(port, settings={"maxmemory": "20mb"})
    for _ in range(2):
        with valkey:
            assert valkey.url == f"redis://127.0.0.1:{port}/0"
            with Redis.from_url(valkey.url) as client:
                assert client.config_get("maxmemory") == {"maxmemory": str(20 * 2**20)}


def test_a_taken_port_is_an_error_with_the_servers_own_words() -> None:
    with EmbeddedValkey() as first:
        second = EmbeddedValkey(first.port)
        with pytest.raises(EmbeddedValkeyError, match="Address already in use"):
            second.start()
        assert second.pid is None
        with Redis.from_url(first.url) as client:
            assert client.ping()


def test_a_wrong_setting_is_an_error_with_the_servers_own_words() -> None:
    with pytest.raises(EmbeddedValkeyError, match="no-such-setting"):
        EmbeddedValkey(settings={"no-such-setting": "1"}).start()


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent is Linux's")
def test_it_dies_with_an_owner_that_was_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        pid = int(owner.stdout.readline().split()[0])
        assert is_alive(pid)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)
