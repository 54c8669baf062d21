"""Fixtures that several test folders share."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import settings

from serve.embedded_valkey import EmbeddedValkey

# The same examples in every run, and none of them against the clock. New ones: `pytest --hypothesis-profile=default`.
settings.load_profile("ci")

# A shell that starts the tests in the background has SIGINT ignored, and every process that they start inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """URL of a real Valkey server, one for the whole session: keep to keys of your own `fleet`."""
    with EmbeddedValkey() as valkey:
        yield valkey.url


@pytest.fixture
def fleet() -> str:
    """A fleet name that no other test has."""
    return f"test-{uuid.uuid4().hex[:12]}"
