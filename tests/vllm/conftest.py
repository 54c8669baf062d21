"""vLLM is imported once, here, and only where it is installed: without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> Iterator[None]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM isn't installed: make install-vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Importing vLLM and torch warns of what they deprecate in each other. Only the import may: tests run with
        # warnings as errors.
        with warnings.catch_warnings(action="ignore"):
            import vllm.v1.core.sched.scheduler  # noqa: F401
        logging.getLogger("vllm").setLevel(logging.ERROR)
        yield
