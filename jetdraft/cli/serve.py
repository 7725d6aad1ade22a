"""jetdraft serve: a bundle behind an API as OpenAI's is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jetdraft.cli.options import bundle_argument, optional, runtime_options
from jetdraft.errors import OptionError
from jetdraft.runtime.pool import Pool


@click.command("serve")
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True)
@click.option(
    "--api-key",
    envvar="JETDRAFT_API_KEY",
    default="",
    help="What clients must send; needed to listen elsewhere than on loopback.",
)
@click.option("--name", help="The model's name; default: the bundle folder's.")
@click.option(
    "--models",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="How many requests are answered at once, each with buffers of its own.",
)
@click.option("--method", help="Of requests that ask for none; default: auto.")
@click.option(
    "--max-new-tokens", type=click.IntRange(1), default=1024, show_default=True
)
@click.option(
    "--max-body-bytes", type=click.IntRange(1), default=1_000_000, show_default=True
)
@click.option(
    "--max-waiting",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Requests that may wait for a model.",
)
@click.option(
    "--max-wait",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds that one may wait.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds that a text may take.",
)
@click.option(
    "--drain",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that texts under way have to end in on SIGTERM.",
)
@click.option(
    "--store", type=click.Path(path_type=Path), help="A file to keep responses in."
)
@runtime_options
def command(
    bundle: Path,
    host: str,
    port: int,
    api_key: str,
    name: str | None,
    models: int,
    max_new_tokens: int,
    max_body_bytes: int,
    max_waiting: int,
    max_wait: float,
    max_seconds: float,
    drain: int,
    **options: Any,
) -> None:
    """Answer requests for BUNDLE's model over HTTP, until SIGTERM or Ctrl-C."""
    running = optional("server.running", "serving", "serve")
    app = optional("server.app", "serving", "serve")
    if not app.is_loopback(host) and not api_key:
        raise OptionError(
            f"anyone could use a server on {host}; give --api-key, or set "
            "JETDRAFT_API_KEY"
        )
    limits = app.Limits(
        max_body_bytes, max_new_tokens, max_waiting, max_wait, max_seconds
    )
    with running.listening(host, port) as listener:
        pool = Pool(bundle, models, **options)
        service = app.Service(pool, name or bundle.resolve().name, limits, api_key)
        address = running.url(listener)
        click.echo(f"{service.name} answers at {address}", err=True)
        running.run(service, listener, host, drain)
