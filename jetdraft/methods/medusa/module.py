"""Medusa (2401.10774) and Hydra (2402.05109): heads that each guess a token."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.errors import CheckpointError, printable


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """The sizes of heads, and how many residual blocks or layers each head has."""

    blocks: int = 1


class GuessingHeads(DraftModule):
    """Heads that read the features of row t, and guess tokens t + 2, t + 3, ..."""

    config: MedusaConfig
    reads = Reads(features=True, guesses=True, buffers=False)
    lm_heads: nn.ModuleList

    def _make_lm_heads(self) -> nn.ModuleList:
        sizes = self.config.hidden_size, self.config.draft_vocab_size
        slots = range(self.config.slots)
        return nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in slots)

    def guesses(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return logits [b, n, slots, vocabulary]; `tokens` int64 [b, n] are t + 1."""
        raise NotImplementedError

    def draft(self, given: DraftInputs) -> tuple[Tensor, None]:
        """Return the logits [1, slots, choices] of all heads at the last row."""
        last = given.features[:, given.answer_rows][:, -1:]
        tokens = given.tokens[:, given.answer_rows][:, -1:]
        return self.guesses(last, tokens)[:, 0], None

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        files.check_keys(cls.keys)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        """Read the config from the tensors, and the first ids if they lack tokens."""
        cls.check(files)
        width = target.model.config.get_text_config(decoder=True).hidden_size
        drafted = files.fit_heads(tensors, target)
        places = [name.split(".") for name in tensors]
        sizes = {"slots": sum(place[0] == "lm_heads" for place in places)}
        sizes["blocks"] = len({p[2] for p in places if p[0] in ("blocks", "mlps")})
        sizes["draft_vocab_size"] = drafted
        ids = None if drafted == target.vocab_size else torch.arange(drafted)
        return MedusaConfig.beside(target, width, **sizes), ids


class Medusa(GuessingHeads):
    """Head i reads the features of row t and predicts token t + 2 + i, i from 0."""

    published = "Medusa"
    keys = (
        "medusa_num_heads",  # published configs have it wrong: tensors are counted
        *("medusa_num_layers", "base_model_name_or_path", "version"),
        # vLLM's; the tensors say whether there is a bias, and two are of its trees.
        *("num_heads", "hidden_size", "vocab_size", "truncated_vocab_size"),
        *("medusa_fc_bias", "max_paths", "topk", "max_seq_len"),
    )
    renames = (
        (r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"(?:medusa_head\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
        (r"medusa_heads\.blocks\.(\d+)\.layers\.(\d+)\.(\w+)", r"blocks.\1.\2.\3"),
        (r"medusa_heads\.lm_heads\.(\d+)\.weight", r"lm_heads.\1.weight"),
    )

    def __init__(self, config: MedusaConfig, target: Any = None) -> None:
        super().__init__(config, target)
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(config.blocks))
            for _ in range(config.slots)
        )
        self.lm_heads = self._make_lm_heads()

    def forward(self, features: Tensor) -> Tensor:
        """Map features [b, n, w] to states for the LM heads [b, n, slots, w]."""
        states = []
        for blocks in self.blocks:
            state = features
            for block in blocks:  # type: ignore[attr-defined]
                state = state + nn.functional.silu(block(state))
            states.append(state)
        return torch.stack(states, dim=2)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return every head's logits: [b, n, slots, w] to [b, n, slots, vocabulary]."""
        heads = zip(self.lm_heads, hidden.unbind(2), strict=True)
        return torch.stack([head(state) for head, state in heads], dim=2)

    def guesses(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.logits(self(features))

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        named = files.has_tensor(r"medusa_heads\.lm_heads\..*")
        return named or "medusa_num_heads" in files.config

    @classmethod
    def rename_tensors(cls, files: HeadFiles) -> dict[str, Tensor]:
        """Rename the tensors; raises `CheckpointError` for a name without a rule."""
        tensors = super().rename_tensors(files)
        kept = {id(tensor) for tensor in tensors.values()}
        for name, tensor in files.tensors.items():
            if name in tensors or id(tensor) not in kept:
                fact = f"has {printable(name, 60)} where Medusa has heads like "
                raise files.refusal(f"{fact}0.0.linear.weight and 0.1.weight")
        return tensors

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        heads = sorted(n.split(".")[1] for n in tensors if n.startswith("lm_heads."))
        if not heads or set(heads) != set(map(str, range(len(heads)))):
            names = printable(", ".join(heads) or "none", 60)
            fact = f"has the heads {names}, which must be numbered from 0 on"
            raise files.refusal(fact)
        first = tensors["lm_heads.0.weight"]
        config, ids = super().configure(files, target, tensors)
        rows = files.config.get("truncated_vocab_size")
        if rows not in (None, target.vocab_size, len(first)):
            raise CheckpointError(
                f"the config of {files.source} has truncated_vocab_size="
                f"{printable(rows, 60)}; jetdraft reads Medusa heads that choose among "
                "all tokens"
            )
        blocks = [name for name in tensors if name.startswith("blocks.")]
        if not any(name.endswith(".bias") for name in blocks):  # vLLM's have none
            for name in blocks:
                bias = name.removesuffix("weight") + "bias"
                tensors[bias] = torch.zeros(len(tensors[name]))
        return config, ids


class Hydra(GuessingHeads):
    """Head i reads features of row t, tokens t + 1 to t + 1 + i; guesses t + 2 + i."""

    published = "Hydra"
    keys = (
        *("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "grounded_heads"),
        *("hidden_state_offset", "base_model_name_or_path"),
    )
    renames = (
        (r"hydra_mlp\.(.*)", r"mlps.\1"),
        (r"hydra_lm_head\.(.*)", r"lm_heads.\1"),
    )

    def __init__(self, config: MedusaConfig, target: Any) -> None:
        super().__init__(config, target)
        self.embed_tokens = target.get_input_embeddings()
        width = config.hidden_size
        self.mlps = nn.ModuleList(
            nn.ModuleList(
                _ResidualBlock(width * (slot + 2) if layer == 0 else width, width)
                for layer in range(config.blocks)
            )
            for slot in range(config.slots)
        )
        self.lm_heads = self._make_lm_heads()

    def forward(self, slot: int, features: Tensor, tokens: Tensor) -> Tensor:
        """Return states [b, n, w] of a head after `tokens` int64 [b, n, slot + 1]."""
        # In a graph, a quantized embedding takes ids of two axes.
        rows = self.embed_tokens(tokens.flatten(1))
        embedded = rows.unflatten(1, tokens.shape[1:]).flatten(2)
        state = torch.cat([features, embedded.to(features.dtype)], dim=-1)
        for block in self.mlps[slot]:  # type: ignore[attr-defined]
            state = block(state)
        return state

    def guesses(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Return every head's logits; a head reads the best tokens of those before."""
        path, guesses = tokens[..., None], []
        for slot, lm_head in enumerate(self.lm_heads):
            guesses.append(lm_head(self(slot, features, path)))
            best = guesses[-1].argmax(-1, keepdim=True)
            path = torch.cat([path, best if self.ids is None else self.ids[best]], -1)
        return torch.stack(guesses, dim=2)

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        return "hydra_num_heads" in files.config

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        """Raise `CheckpointError` for keys or a kind of Hydra that is not known."""
        super().check(files)
        config = files.config
        values = {"hydra_head_arch": "mlp", "grounded_heads": True}
        for name, value in (values | {"hidden_state_offset": 0}).items():
            if config.get(name, value) != value:
                raise CheckpointError(
                    f"the config of {files.source} has {name}={config[name]!r}; "
                    f"jetdraft reads heads with {name}={value!r}"
                )

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        mlp = r"hydra_mlp\.\d+\.\d+\.(linear|res_connection)\.(weight|bias)"
        head = r"hydra_lm_head\.\d+\.weight"
        if not (files.has_tensor(mlp) and files.has_tensor(head)):
            fact = "has no tensors like hydra_mlp.0.0.linear.weight and "
            raise files.refusal(f"{fact}hydra_lm_head.0.weight")
        return super().configure(files, target, tensors)


class _ResidualBlock(nn.Module):
    """A residual block, with a matrix in place of the identity where widths differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection: nn.Module = (
            nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs)
        )

    def forward(self, state: Tensor) -> Tensor:
        kept: Tensor = self.res_connection(state)
        return kept + nn.functional.silu(self.linear(state))
