"""Ports for servers that listen a moment later, so that nobody else is given them meanwhile."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_QUIET_PORTS = range(20_000, 30_000)
_set_aside: set[int] = set()


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port. While it is open nobody else is given that port, yet a server that sets
    SO_REUSEADDR, as all do, can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.bind((host, 0))
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


def quiet_ports(count: int) -> list[int]:
    """Free ports that nobody is given by chance, for servers that other processes start later: none of those that Linux
    hands out itself (from 32768 on), nor of Ray's (10002-19999, 30000-31000), and none twice: its server may be yet to
    start. Raises OSError where there are too few.
    """
    found: list[int] = []
    for port in random.sample(_QUIET_PORTS, len(_QUIET_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            if port not in _set_aside:
                probe.bind(("", port))
                found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports in {_QUIET_PORTS.start}-{_QUIET_PORTS.stop - 1}")
    _set_aside.update(found)
    return found


def quiet_port() -> int:
    return quiet_ports(1)[0]


def set_aside(port: int) -> None:
    """It is somebody's already, though nobody listens there yet: no quiet port of this process will be that one."""
    _set_aside.add(port)
