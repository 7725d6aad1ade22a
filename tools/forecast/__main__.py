"""Says what a provider will do with the graphs of a bundle; nothing is run.

    python -m tools.forecast BUNDLE cuda        # or webgpu, tensorrt

The provider need not be on this machine. Exits with 2 if a node cannot run.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from jetdraft.bundle import Bundle
from jetdraft.cli import StandaloneCommand
from jetdraft.cli.flags import bundle_argument, json_option
from jetdraft.errors import CheckError
from tools.forecast.forecast import forecasts
from tools.forecast.kernel_table import TABLES


@click.command("forecast", cls=StandaloneCommand)
@bundle_argument
@click.argument("provider", type=click.Choice(TABLES))
@json_option
def main(bundle: Path, provider: str, as_json: bool) -> None:
    """Say, node by node, what PROVIDER will do with the graphs of BUNDLE."""
    graphs = list(forecasts(Bundle.open(bundle), provider))
    if as_json:
        click.echo(json.dumps({"graphs": [graph.to_json() for graph in graphs]}))
    else:
        for line in (line for graph in graphs for line in graph.lines()):
            click.echo(line)
    refused = [(graph.file, verdict) for graph in graphs for verdict in graph.refused]
    if refused:
        file, verdict = refused[0]
        raise CheckError(
            f"{len(refused)} nodes cannot run on {provider}, for example "
            f"{verdict.operator} of {file}: {verdict.reason}; export the bundle for it"
        )


if __name__ == "__main__":
    main()
