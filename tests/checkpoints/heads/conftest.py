from types import SimpleNamespace

import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from tests.checkpoints.heads.layouts import LAYERS
from tests.tiny import VOCAB_SIZE, llama_config, save_checkpoint

ROWS = 12


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Seven layers, and frequencies that no head has."""
    config = llama_config(
        num_hidden_layers=LAYERS,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("heads") / "target"
    save_checkpoint(folder, config, tokenizer=False)
    return Checkpoint.load(str(folder), torch.float32)


def watched(model, ids):
    entered = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        for layer in (*model.model.layers, model.model.norm)
    ]
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return entered, out


@pytest.fixture(scope="session")
def states(target):
    """What the target says of a text: `streams` [0..N] and the state `final`."""
    ids = torch.randint(VOCAB_SIZE, (1, ROWS + 1), generator=torch.manual_seed(1))
    target.model.set_attn_implementation("eager")
    entered, out = watched(target.model, ids[:, :ROWS])
    target.model.set_attn_implementation("jetdraft")
    return SimpleNamespace(
        streams=[state[0] for state in entered],
        final=out.hidden_states[-1][0],
        tokens=ids[0, 1:],
        positions=torch.arange(ROWS),
    )
