"""jetdraft doctor: is this machine fit, and what to mend first."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.devices.doctor import examine
from jetdraft.errors import CheckError


@click.command("doctor")
@click.option("--root", default="/", hidden=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(root: Path, as_json: bool) -> None:
    """Look at driver, onnxruntime, providers, memory, power mode and clocks."""
    findings = examine(root)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(each) for each in findings]}))
    else:
        for each in findings:
            click.echo(f"{each.what:18} {each.found}")
            if each.fix:
                click.echo(f"{'':18} -> {each.fix}")
    wrong = [each for each in findings if each.wrong]
    if wrong:
        raise CheckError(f"{wrong[0].what}: {wrong[0].found}; {wrong[0].fix}")
