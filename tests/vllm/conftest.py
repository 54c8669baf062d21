"""vLLM is imported once, here, and only where it is installed: without it these tests are skipped."""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Imports of vLLM and torch warn about each other: their authors' matter. Tests themselves run with warnings as errors.
IMPORT_WARNINGS = "ignore"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(os.path.dirname(__file__)):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM isn't installed: make install-vllm")
    with warnings.catch_warnings(action="ignore"):
        import vllm  # noqa: F401
        import vllm.v1.core.sched.scheduler  # noqa: F401
