"""`whohas explain`: where would this request go, and why?"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any, BinaryIO

import click

from serve.cli import state


@click.command()
@click.argument("body", type=click.File("rb"), default="-")
@click.option("--url", help="Base URL of whohas.  [default: the running `whohas up`, or http://127.0.0.1:8000]")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def explain(body: BinaryIO, url: str | None, as_json: bool) -> None:
    """Say where the request in BODY (a JSON file, or - for standard input) would go, and why. Nothing is sent there."""
    base = url or state.read().get("url", state.DEFAULT_URL)
    answer = _post(f"{base.rstrip('/')}/explain", body.read())
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(f"{answer['replica']}: {answer['reason']}")
    click.echo(
        f"{answer['predicted_cached_tokens']} of {answer['prompt_tokens']} prompt tokens should be cached there\n"
    )
    click.echo(f"{'replica':<24}{'overlap':>9}{'cost s':>10}   terms")
    for one in answer["candidates"]:
        terms = "  ".join(f"{name} {value:.3f}" for name, value in one["terms"].items())
        click.echo(f"{one['replica']:<24}{one['overlap_blocks']:>9}{one['cost_s']:>10.3f}   {terms}")


def _post(url: str, raw: bytes) -> dict[str, Any]:
    request = urllib.request.Request(url, data=raw, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text.strip()[:200]
        click.echo(f"whohas: {error.code} from {url}: {text}", err=True)
    except (urllib.error.URLError, OSError) as error:
        click.echo(f"whohas: nothing answers at {url} ({error}); is `whohas up` running, or is --url wrong?", err=True)
    sys.exit(1)
