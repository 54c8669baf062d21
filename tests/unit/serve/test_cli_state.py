"""Where `whohas up` says that it answers."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from serve.cli import state


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_what_is_written_is_read_and_cleared_and_nobody_else_may_read_it(folder: Path) -> None:
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        state.write(url, "redis://me:secret@127.0.0.1:3/0")
        assert (state.read()["url"], state.read()["pid"]) == (url, os.getpid())
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state.clear()
    assert state.read() == {}
    assert not list(folder.iterdir())


def test_a_reader_finds_all_of_it_or_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the file may look at any moment: it gets its name when it is complete."""
    named, replace = [], os.replace

    def look_and_replace(half: str, file: Path) -> None:
        named.append((list(folder.glob("whohas-*.json")), json.loads(Path(half).read_text())["url"]))
        replace(half, file)

    monkeypatch.setattr("os.replace", look_and_replace)
    state.write("http://127.0.0.1:1", "redis://127.0.0.1:3/0")
    assert named == [([], "http://127.0.0.1:1")]
