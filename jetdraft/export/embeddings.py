"""Small embeddings of a target's tokens, to find similar requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetdraft.bundle import SIMILARITY

SIZE = 64
_SEED = 20_11_21


def write_similarity(folder: Path, model: Any) -> None:
    """Write int8 [vocab, 64]: token embeddings, centred, projected, of unit length.

    A random projection keeps angles (Johnson and Lindenstrauss, 1984). Its errors
    average out, since requests are compared by the means over their tokens.
    """
    table = model.get_input_embeddings().weight.detach().float()
    random = torch.Generator().manual_seed(_SEED)
    projection = torch.randn(table.shape[1], SIZE, generator=random)
    small = torch.nn.functional.normalize((table - table.mean(0)) @ projection)
    np.save(folder / SIMILARITY, (small * 127).round().to(torch.int8).numpy())
