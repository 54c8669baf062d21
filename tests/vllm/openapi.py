"""The OpenAPI document of the installed vLLM, without its wording, for tests/fixtures/vllm/openapi.json:

python -m tests.vllm.openapi tests/fixtures/vllm/openapi.json
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from replicas import vllm_command

_WORDING = ("description", "title", "summary", "examples", "operationId")
_HELPERS = ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/health", "/metrics", "/ping", "/invocations", "/load")


def document() -> dict[str, Any]:
    """As `vllm serve` answers /openapi.json for a model that generates, less what the front doesn't pass on."""
    setattr(importlib.metadata, "version", vllm_command._answer)  # noqa: B010
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    args = import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(parser).parse_args(["--model", "m"])
    app = import_module("vllm.entrypoints.launchers.app").build_app(args, ("generate",))
    found = app.openapi()
    paths = {path: value for path, value in found["paths"].items() if path not in _HELPERS}
    told: dict[str, Any] = _without_wording({**found, "paths": paths})
    return {**told, "info": {"title": "vLLM", "version": vllm_command.installed_version()}}


def _without_wording(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_wording(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {k: _without_wording(v) for k, v in value.items() if not (k in _WORDING and isinstance(v, str | list))}
    return {**kept, "description": ""} if "content" in kept and "description" in value else kept


def main() -> None:
    text = json.dumps(document(), separators=(",", ":"), sort_keys=True)
    Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
