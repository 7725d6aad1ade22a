"""Other people's clients against the toy; `scripts/clients` sets JETDRAFT_CLIENTS."""

import os
import shutil
from pathlib import Path

import pytest

from jetdraft import Pool
from jetdraft.server import Limits
from jetdraft.server.app import Service
from tests.programs import ended
from tests.server.serving import served

FOLDER = os.environ.get("JETDRAFT_CLIENTS")
CLIENTS = (
    *("openai", "anthropic", "ollama", "langchain-openai", "llama-index", "litellm"),
    *("instructor", "openai-agents", "ai"),
)
pytestmark = pytest.mark.skipif(not FOLDER, reason="run scripts/clients")


@pytest.fixture(scope="module")
def address(toy):
    limits = Limits(max_new_tokens=400)
    with Pool(toy, 2, threads=1) as pool, served(Service(pool, "toy", limits)) as url:
        yield url


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client(address, client):
    own = Path(FOLDER or "") / client
    here = Path(__file__)
    command = own / "bin" / "python", here.with_name("uses.py"), client
    if client == "ai":  # node looks for packages beside the script
        command = "node", shutil.copy(here.with_name("use_ai.mjs"), own)
    done = ended(*command, address, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
