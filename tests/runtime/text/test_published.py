"""Published chat templates, which are fetched by hand and are no part of the repo.

    JETDRAFT_TEMPLATES=FOLDER pytest tests/runtime/text/test_published.py

takes each tokenizer_config.json below the folder with the chat_template.jinja beside
it, and each GGUF file.
"""

import json
import os
from pathlib import Path

import pytest

from jetdraft.bundle import is_token_name
from jetdraft.checkpoints.gguf import GgufFile
from jetdraft.checkpoints.gguf_tokenizer import special_tokens
from tests.runtime.text.chats import CHATS, own_prompt, transformers_prompt

FOLDER = os.environ.get("JETDRAFT_TEMPLATES")
FILES = [
    file
    for pattern in ("tokenizer_config.json", "*.gguf")
    for file in (sorted(Path(FOLDER).rglob(pattern)) if FOLDER else ())
]


def published(file):
    """The templates of a checkpoint, and its special tokens."""
    if file.suffix == ".gguf":
        field = GgufFile(str(file)).field
        return [field("tokenizer.chat_template")], special_tokens(field)
    config = json.loads(file.read_text())
    template = config.get("chat_template")
    if (beside := file.with_name("chat_template.jinja")).is_file():
        template = beside.read_text()
    stored = {
        name: token
        for name, token in config.items()
        if is_token_name(name) and isinstance(token, (str, dict))
    }
    tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in stored.items()
    }
    several = template if isinstance(template, list) else [{"template": template}]
    return [each["template"] for each in several if each["template"]], tokens


@pytest.mark.skipif(not FILES, reason="JETDRAFT_TEMPLATES names no templates")
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_published_template_renders_as_transformers_does(file, chat):
    templates, tokens = published(file)
    if not templates:
        pytest.skip("no chat template")
    for source in templates:
        expected = transformers_prompt(source, tokens, chat)
        assert own_prompt(source, tokens, chat) == expected
