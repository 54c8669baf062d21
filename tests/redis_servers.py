"""Real Valkey servers as they are run: a primary and a replica, behind Sentinel, in a cluster, with TLS; and a proxy in
front of one, for what networks do."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from replicas.ports import quiet_port, quiet_ports
from serve.embedded_valkey import EmbeddedValkey, _binary, _die_with

DEADLINE_S = 60.0


def admin(server: EmbeddedValkey, *command: Any) -> Any:
    with Redis(port=server.port, socket_timeout=30) as client:
        client.response_callbacks.pop("CLUSTER GETKEYSINSLOT", None)  # it takes keys for text
        return client.execute_command(*command)


def wait_until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.05)


def follow(replica: EmbeddedValkey, primary: EmbeddedValkey) -> None:
    """Make one a replica of the other and wait for its copy."""
    admin(replica, "REPLICAOF", "127.0.0.1", primary.port)
    wait_until(lambda: admin(replica, "INFO", "replication")["master_link_status"] == "up")


@contextmanager
def pair() -> Iterator[tuple[EmbeddedValkey, EmbeddedValkey]]:
    """A primary and its replica."""
    settings = {"repl-diskless-sync-delay": "0"}
    with EmbeddedValkey(settings=settings) as primary, EmbeddedValkey(settings=settings) as replica:
        follow(replica, primary)
        yield primary, replica


@contextmanager
def sentinel(folder: Path, primary: EmbeddedValkey, service: str = "main") -> Iterator[int]:
    """One Sentinel that watches `primary`; its port. It fails over when told to, not for a server that is slow once."""
    port = quiet_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {service} 60000\nsentinel failover-timeout {service} 60000\n"
    )
    with (folder / "sentinel.log").open("wb") as log:
        process = subprocess.Popen(
            [_binary(), str(config), "--sentinel"], stdout=log, stderr=log, preexec_fn=_die_with(os.getpid())
        )
    try:
        wait_until(lambda: _replicas_known(port, service) > 0)
        yield port
    finally:
        process.kill()
        process.wait()


def fail_over(port: int, service: str = "main") -> None:
    """Have the Sentinel at `port` promote the replica and demote the primary."""

    def begun() -> bool:
        try:
            with Redis(port=port, socket_timeout=5) as client:
                client.execute_command("SENTINEL FAILOVER", service)
        except ResponseError:  # it has not asked the replica how it is yet
            return False
        return True

    wait_until(begun)


def _replicas_known(port: int, service: str) -> int:
    try:
        with Redis(port=port, socket_timeout=5) as client:
            return int(client.sentinel_master(service)["num-slaves"])
    except RedisError:
        return 0


@contextmanager
def cluster(nodes: int = 3) -> Iterator[list[EmbeddedValkey]]:
    """Primaries that share the hash slots evenly."""
    with ExitStack() as stack:
        servers, buses = [], quiet_ports(nodes)
        for bus in buses:
            settings = {"cluster-enabled": "yes", "cluster-port": str(bus), "cluster-node-timeout": "5000"}
            servers.append(stack.enter_context(EmbeddedValkey(settings=settings)))
        share = 16384 // nodes
        for i, server in enumerate(servers):
            last = 16383 if i == nodes - 1 else (i + 1) * share - 1
            admin(server, "CLUSTER ADDSLOTSRANGE", i * share, last)
            for other, bus in zip(servers[:i], buses, strict=False):
                admin(server, "CLUSTER MEET", "127.0.0.1", other.port, bus)
        wait_until(lambda: all(_cluster_ok(server, nodes) for server in servers))
        yield servers


def _cluster_ok(server: EmbeddedValkey, nodes: int) -> bool:
    told = admin(server, "CLUSTER INFO")
    return bool(told["cluster_state"] == "ok") and int(told["cluster_known_nodes"]) == nodes


def certificate(folder: Path) -> tuple[Path, Path]:
    """Key and certificate for 127.0.0.1, signed by itself."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    cert = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    key_file, cert_file = folder / "key.pem", folder / "cert.pem"
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    cert_file.write_bytes(cert.public_bytes(Encoding.PEM))
    return key_file, cert_file


class Proxy:
    """TCP connections to the server that `target` names when one begins."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.held = 0  # how many pieces of data have had to wait
        self._free = asyncio.Event()
        self._free.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def hold(self, held: bool) -> None:
        """Let nothing through, without telling anybody."""
        if held:
            self._free.clear()
        else:
            self._free.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", self.target)
                self._writers.add(back)
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
                self._writers.discard(back)
        except asyncio.CancelledError:
            pass  # the proxy ends; a cancelled handler would be reported as an error
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.held += not self._free.is_set()
                await self._free.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def close(self) -> None:
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def proxy(target: int, tls: tuple[Path, Path] | None = None) -> AsyncIterator[Proxy]:
    """`tls`: key and certificate; then clients must speak TLS."""
    here = Proxy(target)
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls[1], tls[0])
    server = await asyncio.start_server(here.serve, "127.0.0.1", 0, ssl=context)
    here.port = int(server.sockets[0].getsockname()[1])
    try:
        yield here
    finally:
        server.close()
        await here.close()
