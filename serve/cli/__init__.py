"""The `whohas` command. One file per subcommand; Ray is imported only by those that need it."""

from __future__ import annotations

import sys

import click

from serve.cli.bench import bench
from serve.cli.doctor import doctor
from serve.cli.explain import explain
from serve.cli.map import map_command
from serve.cli.up import up


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="whohas", message="%(version)s")
def cli() -> None:
    """Send every LLM request to the vLLM replica that already holds its KV blocks."""


cli.add_command(up)
cli.add_command(explain)
cli.add_command(map_command)
cli.add_command(doctor)
cli.add_command(bench)


def main() -> None:
    try:
        cli()
    except BrokenPipeError:
        sys.exit(141)
