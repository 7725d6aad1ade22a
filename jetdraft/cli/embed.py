"""jetdraft embed: the embeddings of texts."""

import json
from pathlib import Path

import click
import numpy as np

from jetdraft.cli import flags
from jetdraft.cli.command import Command, option
from jetdraft.files import replacing
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions


@click.command("embed", cls=Command)
@flags.bundle_argument
@option(
    "prompt -p --prompt texts",
    "A text; give the option again for each further text.",
    multiple=True,
    required=True,
)
@option(
    "prompt --prompt-name",
    "The checkpoint's prompt that stands before each text, for example query; "
    "default: the prompt that the checkpoint names, or none.",
)
@option(
    "output -o --output",
    "Write a .npy file, float32 [texts, width]; default: print a line of JSON for "
    "each text.",
    type=flags.PATH,
    callback=lambda _context, _param, value: flags.check_new_file(value),
)
@flags.runtime_options()
def command(
    bundle: Path,
    texts: tuple[str, ...],
    prompt_name: str | None,
    output: Path | None,
    runtime: LoadOptions,
) -> None:
    """Embed texts with BUNDLE: vectors of length 1, whose product is the similarity."""
    vectors = load(bundle, **runtime).embed(texts, prompt_name)
    if output is not None:
        with replacing(output) as partial, partial.open("wb") as file:
            np.save(file, vectors)
        return
    for text, vector in zip(texts, vectors, strict=True):
        click.echo(json.dumps({"text": text, "embedding": vector.tolist()}))
