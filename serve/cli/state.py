"""Where the `whohas up` of this user answers, so that the other commands find it without being told."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"


def _file() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"whohas-{os.getuid()}.json"


def write(url: str, redis: str) -> None:
    """Whole or not at all, and for this user only from the first byte on: a URL may have a password."""
    file = _file()
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder:
        half = Path(folder) / file.name
        half.touch(mode=0o600)
        half.write_text(json.dumps({"pid": os.getpid(), "url": url, "redis": redis}))
        os.replace(half, file)


def clear() -> None:
    if read().get("pid") == os.getpid():
        _file().unlink(missing_ok=True)


def read() -> dict[str, Any]:
    """What the running `whohas up` wrote; empty when none is running."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads(_file().read_text())
        os.kill(state["pid"], 0)
        return dict(state)
    return {}
