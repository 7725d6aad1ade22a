"""jetdraft serve: a bundle behind OpenAI's HTTP API."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import click

from jetdraft.errors import OptionError
from jetdraft.runtime.passes.load_options import LoadOptions
from jetdraft.runtime.pool import Pool
from jetdraft.terminal.command import Command, extra_module, option
from jetdraft.terminal.flags import (
    PATH,
    bundle_argument,
    method_option,
    new_tokens_option,
    runtime_options,
    store_option,
)


@click.command("serve", cls=Command)
@bundle_argument
@option(
    "server",
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on.",
)
@option(
    "server",
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="The port to listen on; 0 picks a free port.",
)
@option(
    "server",
    "--uds",
    type=click.Path(path_type=Path),
    help="A socket in the file system, beside the port, for this user's programs.",
)
@option(
    "server",
    "--api-key",
    envvar="JETDRAFT_API_KEY",
    help="The key that clients must send; required unless --host is loopback.",
)
@option(
    "server", "--name", help="The model's name; default: the name of the bundle folder."
)
@option(
    "server",
    "--models",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Requests answered at once; each model has its own buffers.",
)
@option(
    "server",
    "--drain",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds to finish texts after SIGTERM.",
)
@new_tokens_option(1024)
@option(
    "limits",
    "--max-body-bytes",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="The most bytes of a request's body.",
)
@option(
    "limits",
    "--max-sound-bytes",
    type=click.IntRange(1),
    default=25_000_000,
    show_default=True,
    help="The most bytes of a request with a sound.",
)
@option(
    "limits",
    "--max-waiting",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="The most requests that may wait for a model.",
)
@option(
    "limits",
    "--max-wait",
    type=click.FloatRange(0, min_open=True),
    default=120.0,
    show_default=True,
    help="The most seconds that a request may wait.",
)
@option(
    "limits",
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    default=300.0,
    show_default=True,
    help="The most seconds that a text may take.",
)
@method_option()
@store_option
@option(
    "drafting",
    "--learn",
    metavar="DIR",
    type=PATH,
    help="Keep what the target said where drafts were wrong in this folder, and take "
    "the drafter's weights that train drafter --from-use learns of it; default: keep "
    "nothing.",
)
@runtime_options
def command(
    bundle: Path,
    host: str,
    port: int,
    uds: Path | None,
    api_key: str | None,
    name: str | None,
    models: int,
    max_new_tokens: int,
    max_body_bytes: int,
    max_sound_bytes: int,
    max_waiting: int,
    max_wait: float,
    max_seconds: float,
    drain: int,
    method: str,
    store: Path | None,
    learn: Path | None,
    runtime: LoadOptions,
) -> None:
    """Answer requests for BUNDLE's model over HTTP until SIGTERM or Ctrl-C."""
    app = extra_module("jetdraft.server.app", "serving", "serve")
    admission = extra_module("jetdraft.server.admission", "serving", "serve")
    sockets = extra_module("jetdraft.server.listener", "serving", "serve")
    server = extra_module("jetdraft.server.http_server", "serving", "serve")
    # click takes an empty variable for none, but who set it meant to have a key.
    key = os.environ.get("JETDRAFT_API_KEY") if api_key is None else api_key
    if key is not None:
        admission.check_key(key)
    elif not admission.is_loopback(host):
        raise OptionError(
            f"anyone could use a server on {host}; give --api-key, or set "
            "JETDRAFT_API_KEY"
        )
    limits = app.Limits(
        body_bytes=max_body_bytes,
        new_tokens=max_new_tokens,
        waiting=max_waiting,
        wait_seconds=max_wait,
        seconds=max_seconds,
        sound_bytes=max_sound_bytes,
    )
    with ExitStack() as listeners:
        listener = listeners.enter_context(sockets.listening(host, port))
        own = (
            [] if uds is None else [listeners.enter_context(sockets.listening_at(uds))]
        )
        runtime["store"], runtime["learn"] = store, learn
        _log()
        pool = Pool(bundle, models, method, **runtime)
        service = app.Service(pool, name or bundle.resolve().name, limits, key or "")
        places = [sockets.url(listener), *([] if uds is None else [str(uds)])]
        click.echo(f"{service.name} answers at {' and '.join(places)}", err=True)
        server.run(service, [listener, *own], host, drain)


def _log() -> None:
    """Write requests, the drain and the news of learned weights to standard error."""
    logging.disable(logging.NOTSET)  # other verbs drop all logs below errors
    log = logging.getLogger("jetdraft")
    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler()]
