"""jetdraft serve: a bundle behind the HTTP APIs of OpenAI, Anthropic and Ollama."""

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from jetdraft.cli.command import Command, record_flags
from jetdraft.cli.flags import bundle_argument, generate_options, runtime_options
from jetdraft.errors import OptionError, importing
from jetdraft.options import declared
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.pool import Pool
from jetdraft.server import Limits

KEY_VARIABLE = "JETDRAFT_API_KEY"  # The environment variable with the API key.
_server = partial(declared, "server")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where a server listens, and what it serves under which name.

    host: The address to listen on.
    port: The port to listen on; 0 picks a free port.
    uds: A socket in the file system, beside the port, for this user's programs.
    api_key: The key that clients must send; required unless --host is loopback.
        Default: JETDRAFT_API_KEY of the environment.
    allow_origin: Pages of this origin, such as http://localhost:3000, may ask in a
        browser; may be given several times.
    name: The model's name; default: the name of the bundle folder.
    models: Requests answered at once; each model has its own buffers.
    prefixes: Keep the rows of beginnings that prompts share in this folder, for all
        clients; default: each model keeps the rows of its last text.
    images: Let requests name image files below this folder, as file:// addresses.
    drain: Seconds to finish texts after SIGTERM.
    """

    host: str = _server("127.0.0.1")
    port: int = _server(8080, least=0, most=65535)
    uds: Path | None = _server(None)
    api_key: str | None = _server(None)
    allow_origin: tuple[str, ...] = _server((), metavar="ORIGIN")
    name: str | None = _server(None)
    models: int = _server(1, least=1, most=64)
    prefixes: Path | None = _server(None, metavar="DIR")
    images: Path | None = _server(None, metavar="DIR")
    drain: int = _server(30, least=0)


@click.command("serve", cls=Command)
@bundle_argument
@record_flags("server", ServeOptions)
@record_flags("limits", Limits)
@generate_options("method")
@runtime_options("store", "learn")
def command(
    bundle: Path,
    server: ServeOptions,
    limits: Limits,
    options: GenerateOptions,
    runtime: LoadOptions,
) -> None:
    """Answer requests for BUNDLE's model over HTTP until SIGTERM or Ctrl-C."""
    with importing("serving", "serve"):
        from jetdraft.server import app, connection, http_server
    # Who sets an empty variable means to have a key, which is then refused.
    key = os.environ.get(KEY_VARIABLE) if server.api_key is None else server.api_key
    if key is not None:
        connection.check_api_key(key)
    elif not connection.is_loopback(server.host):
        fact = f"anyone could use a server on {server.host}"
        raise OptionError(f"{fact}; give --api-key, or set {KEY_VARIABLE}")
    connection.check_origins(server.allow_origin, is_open=key is None)
    with ExitStack() as opened:
        listener = http_server.open_listener(server.host, server.port)
        listeners = [opened.enter_context(listener)]
        places = [http_server.listener_url(listeners[0])]
        if server.uds is not None:
            listener = http_server.open_unix_listener(server.uds)
            listeners.append(opened.enter_context(listener))
            places.append(str(server.uds))
        # Requests, the drain and the news of learned weights go to standard error.
        logging.disable(logging.NOTSET)  # other verbs drop all logs below errors
        log = logging.getLogger("jetdraft")
        log.setLevel(logging.INFO)
        log.handlers = [logging.StreamHandler()]
        pool = Pool(bundle, server.models, options["method"], **runtime)
        name = server.name or bundle.resolve().name
        access = key or "", server.allow_origin
        folders = server.prefixes, server.images
        service = app.Service(pool, name, limits, *access, *folders)
        click.echo(f"{service.name} answers at {' and '.join(places)}", err=True)
        code = http_server.run(service, listeners, server.host, server.drain)
        click.get_current_context().exit(code)
