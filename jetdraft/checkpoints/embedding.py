"""How a checkpoint embeds texts, by the files of sentence-transformers beside it."""

from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.bundle import LAST, MEAN, Embedding
from jetdraft.checkpoints.defaults import read_fields
from jetdraft.checkpoints.folder import as_checkpoint_error
from jetdraft.checkpoints.layers import Taps
from jetdraft.errors import UnsupportedModelError, printable

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
_POOLINGS = {"mean_tokens": MEAN, "mean": MEAN, "lasttoken": LAST}


def embeds(source: str) -> bool:
    """Whether a folder or a hub id has the files of a model that embeds texts."""
    return read_fields(source, MODULES, list) is not None


def read_embedding(source: str, model: Any) -> tuple[Embedding | None, Taps | None]:
    """Return how a checkpoint embeds, and its taps of the last states; or two None.

    Dense layers without activation come before the mean, in the taps. Raises
    `UnsupportedModelError` for unknown steps, `CheckpointError` for damaged files.
    """
    modules = read_fields(source, MODULES, list)
    if modules is None:
        return None, None
    pooling, steps = "", list[tuple[Tensor, Tensor]]()
    with as_checkpoint_error(source):
        for module in modules:
            kind, path = str(module["type"]).rpartition(".")[2], str(module["path"])
            if kind == "Pooling":
                pooling = _read_pooling(source, path)
            elif kind == "Dense":
                steps.append(_read_dense(source, path))
            elif kind != "Normalize" and (kind, path) != ("Transformer", ""):
                raise _unsupported(source, f"has a step {kind!r} in {path!r}")
        settings = read_fields(source, SETTINGS) or {}
        prompts = {str(n): str(t) for n, t in (settings.get("prompts") or {}).items()}
        if not pooling:
            raise _unsupported(source, "has no step that pools")
        size = model.get_output_embeddings().weight.shape[1]
        taps = _joined(steps, size) if steps else Taps((), size)
    return Embedding(pooling, prompts, settings.get("default_prompt_name")), taps


def _joined(steps: list[tuple[Tensor, Tensor]], size: int) -> Taps:
    """Return taps that do dense layers, each a matrix and a bias, as one layer."""
    matrix, bias = torch.eye(size).double(), torch.zeros(size).double()
    for weight, more in steps:
        matrix, bias = weight @ matrix, weight @ bias + more
    layer = nn.Linear(size, len(bias)).requires_grad_(False)
    layer.weight.data, layer.bias.data = matrix.float(), bias.float()
    parts = {"dense": layer}
    return Taps((), len(bias), lambda states: layer(states[0].float()), parts)


def _read_pooling(source: str, path: str) -> str:
    """Return the pooling in a step's folder, which must be the only kind there."""
    fields, start = read_fields(source, f"{path}/config.json") or {}, "pooling_mode"
    kinds = [n.removeprefix(f"{start}_") for n, v in fields.items() if v is True]
    kinds = [kind for kind in kinds if kind != "include_prompt"]
    kinds += [str(fields[start])] if start in fields else []
    if len(kinds) != 1 or kinds[0] not in _POOLINGS:
        raise _unsupported(source, f"pools by {', '.join(kinds) or 'nothing'}")
    if not fields.get("include_prompt", True):
        raise _unsupported(source, "leaves its prompts out of the pooling")
    return _POOLINGS[kinds[0]]


def _read_dense(source: str, path: str) -> tuple[Tensor, Tensor]:
    fields = read_fields(source, f"{path}/config.json") or {}
    activation = str(fields.get("activation_function", "")).rpartition(".")[2]
    if activation != "Identity":
        raise _unsupported(source, f"has the activation {activation!r}")
    file = transformers.utils.cached_file(source, f"{path}/model.safetensors")
    weights = {name: weight.double() for name, weight in load_file(file).items()}
    matrix = weights["linear.weight"]
    return matrix, weights.get("linear.bias", torch.zeros(len(matrix)).double())


def _unsupported(source: str, fact: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source} {printable(fact)}, and jetdraft embeds texts with the mean or the "
        "last of a decoder's states, and dense layers without activation; see "
        "docs/embeddings.md"
    )
