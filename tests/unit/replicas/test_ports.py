"""Ports that are given away before anybody listens there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from replicas.ports import quiet_port, quiet_ports, reserve_port, set_aside


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_listened_on() -> None:
    with reserve_port("127.0.0.1") as reserved, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(reserved.getsockname())
        server.listen()
        with reserve_port("127.0.0.1") as other:
            assert other.getsockname() != reserved.getsockname()


def test_a_quiet_port_is_free_and_none_that_the_kernel_gives_away() -> None:
    taken = quiet_port()
    first_given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 20_000 <= taken < min(30_000, first_given_away)
    with socket.socket() as server:
        server.bind(("", taken))
        server.listen()
        assert taken not in {quiet_port() for _ in range(200)}


def test_no_quiet_port_is_given_twice_nor_one_that_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.ports._QUIET_PORTS", range(24_000, 24_040))
    monkeypatch.setattr("replicas.ports._set_aside", set())
    for port in range(24_000, 24_020):
        set_aside(port)
    given = [quiet_port() for _ in range(5)] + quiet_ports(5)
    assert len(set(given)) == 10
    assert min(given) >= 24_020
    with pytest.raises(OSError, match="no 11 free ports in 24000-24039"):
        quiet_ports(11)
