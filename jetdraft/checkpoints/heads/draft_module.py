"""A drafter as a torch module that declares what it reads, whatever its method."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints import attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_files
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadConfig, HeadLayers
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import CheckpointError


@dataclass(frozen=True)
class Reads:
    """What a row of a drafter reads, beside keys and values of its own.

    tokens      tokens of a row: its own, and those just before it
    features    states of the target, a row of them for each row
    windows     the features of the last `slots` rows, and as many tokens; row t answers
                for token t + slots + 1
    cut         whether the features are the states between the halves of a cut target
    target_kv   keys and values of the target's `target_layers`
    source      the source of an encoder-decoder, through an encoder of its own
    carries     whether it returns a state that replaces the features of the next row
    guesses     whether it answers for `slots` tokens at once: with buffers, for a block
                of masks
    anchored    whether the last token comes before the masks of a block
    buffers     whether it has a KV cache of its own
    """

    tokens: int = 1
    features: bool = False
    windows: bool = False
    cut: bool = False
    target_kv: bool = False
    source: bool = False
    carries: bool = False
    guesses: bool = False
    anchored: bool = False
    buffers: bool = True

    @property
    def learns(self) -> bool:
        """Whether it can train in use: it drafts token by token from features."""
        trains = self.carries and self.tokens == 1
        return trains and not (self.windows or self.target_kv)


_EMPTY = torch.empty(0)


@dataclass
class DraftInputs:
    """What the rows of a pass are given; what a drafter does not read is empty.

    `tokens` and `positions` are int64 [1, n], `features` [1, n, w], `recent` int64 [1,
    n, r] the tokens before each row, `block` int64 [1, m], `target_length` int32 [1].
    """

    tokens: Tensor
    positions: Tensor
    answer_rows: Tensor
    features: Tensor = _EMPTY
    recent: Tensor = _EMPTY
    block: Tensor = _EMPTY
    target: attention.KeysAndValues = field(default_factory=list)
    target_length: Tensor = _EMPTY
    cache: Cache = field(default_factory=attention.PassThroughCache)


# Pairs of a pattern of names in files and a name in a module; None drops a tensor.
Renames = tuple[tuple[str, str | None], ...]
LAYER_RENAME = (r"(layers\..*)", r"stack.\1")  # Tensors of decoder layers.
TARGET_RENAMES: Renames = ((r"(lm_head|embed_tokens)\..*", None), LAYER_RENAME)


class DraftModule(nn.Module):
    """A drafter; `ids` int64 [draft vocabulary] are the target's ids, None for all.

    published         the published heads that it reads, as users call them: "EAGLE-1"
    speculators       the names of such heads in the library speculators
    in_target         whether it lies in the files of its target
    mark              the name of a tensor that only files of this class have
    model_types       what only the config of this class says of its `model_type`
    recognized_last   whether it is tried last, since its files have no own mark
    cuts_vocabulary   whether an export can cut its LM head to a part of the vocabulary
    keys              the keys of its config that have an effect
    has_own_matrices  whether its files may hold an embedding and an LM head of its own
    fusion_names      the modules that fuse taps, in the target's graph and in float32
    architecture      what the config calls it, of jetdraft's drafters of one layer
    target_layers     the target's layers that it reads, by the numbers of their buffers
    """

    published: ClassVar[str] = ""
    speculators: ClassVar[tuple[str, ...]] = ()
    in_target: ClassVar[bool] = False
    mark: ClassVar[str] = ""
    model_types: ClassVar[tuple[str, ...]] = ()
    recognized_last: ClassVar[bool] = False
    cuts_vocabulary: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads()
    keys: ClassVar[Collection[str]] = head_files.LAYER_KEYS
    renames: ClassVar[Renames] = TARGET_RENAMES
    has_own_matrices: ClassVar[bool] = False
    fusion_names: ClassVar[tuple[str, ...]] = ()
    architecture: ClassVar[str] = ""
    target_layers: tuple[int, ...] = (-1,)
    has_target_head_rows = False  # Whether its LM head is some rows of the target's.
    config: HeadConfig
    ids: Tensor | None = None
    stack: HeadLayers
    embed_tokens: Any
    lm_head: Any

    def __init__(self, config: HeadConfig, target: Any = None) -> None:
        super().__init__()
        self.config, self.ids = config, None
        # Others have ends of their own, or only one of the target's.
        if self.architecture or self.has_own_matrices:
            self.embed_tokens = target.get_input_embeddings()
            self.lm_head = target.get_output_embeddings()

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        """Whether the files hold a drafter of this class; by default by their mark."""
        is_marked = cls.mark in files.tensors
        return is_marked or files.config.get("model_type") in cls.model_types

    @classmethod
    def check(cls, files: HeadFiles) -> None:
        """Raise `CheckpointError` for a config that fits no target; here, never."""

    @classmethod
    def rename_tensors(cls, files: HeadFiles) -> dict[str, Tensor]:
        """Return the tensors of the files by their names in this module."""
        return files.rename_tensors(cls.renames)

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        """Return the config and `ids`, here None for all; raises `CheckpointError`."""
        files.check_keys(cls.keys)
        fields = files.fields_beside(tensors, target)
        if cls.architecture and fields["num_layers"] != 1:
            fact = f"has {fields['num_layers']} layers, and jetdraft reads "
            fact += f"{cls.published} drafters of one"
            raise files.refusal(fact, "give such a drafter")
        return HeadConfig(draft_vocab_size=fields["vocab_size"], **fields), None

    def make_own_matrices(self, source: str, tensors: Mapping[str, Tensor]) -> None:
        """Make the embedding and LM head that the files have; or `CheckpointError`."""
        if not self.has_own_matrices:
            return
        config, ids = self.config, self.ids
        embedding = tensors.get(head_files.EMBEDDING_WEIGHT)
        rows = tensors.get(head_files.LM_HEAD_WEIGHT)
        if embedding is not None and not _equal(embedding, self.embed_tokens.weight):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        own_rows = ids is not None or not _equal(rows, self.lm_head.weight)
        if rows is not None and own_rows:
            size = config.draft_vocab_size
            self.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        elif ids is not None:
            self.lm_head = lm_head_rows(self.lm_head, ids)
            self.has_target_head_rows = True
        for name in ("embed_tokens", "lm_head"):
            width = getattr(self, name).weight.shape[1]
            if width != config.hidden_size:
                raise CheckpointError(
                    f"{source} has no {name}.weight, and the target's is {width} wide "
                    f"where the head is {config.hidden_size}; fetch it again"
                )

    def after_loading(self) -> None:
        """Hook that runs after the weights have been loaded; here it does nothing."""

    def target_weight_prefixes(self, target: Checkpoint) -> tuple[str, ...]:
        """Return the beginnings of the names of weights that the target provides."""
        theirs = {id(weight) for weight in target.model.parameters()}
        names = [
            f"{name}."
            for name, module in self.named_children()
            if any(id(weight) in theirs for weight in module.parameters())
        ]
        return (*names, "lm_head.") if self.has_target_head_rows else tuple(names)

    def attend_with(self, implementation: str) -> None:
        """Set the attention: "eager", "sdpa", or "jetdraft" over fixed KV buffers."""
        if isinstance(getattr(self, "stack", None), HeadLayers):
            attention.set_attention_of_parts(self.stack, implementation)

    @property
    def first_layer(self) -> Any:
        return self.stack.layers[0]

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Make features [b, n, w] of tapped states [b, n, h]; here of a single tap."""
        (state,) = taps
        return state

    def fusion_modules(self) -> dict[str, nn.Module]:
        """Return the modules of `fuse` by name; {} without taps."""
        names = [name for name in self.fusion_names if hasattr(self, name)]
        return {name: getattr(self, name) for name in names if self.config.taps}

    @property
    def block_rows(self) -> int:
        """The rows of a block: the masks, and with `anchored` the token before them."""
        return self.config.slots + self.reads.anchored

    def kv_shapes(self, target: StepContract) -> tuple[tuple[int, int], ...]:
        """Return (kv_heads, head_dim) of each layer; (0, 0) if only a pass can tell."""
        if not self.reads.buffers:
            return ()
        config = self.config
        if self.reads.source:
            return target.kv_shapes[: config.num_layers]
        return ((config.num_kv_heads, config.head_dim),) * config.num_layers

    def draft(self, given: DraftInputs) -> tuple[Tensor, Tensor | None]:
        """Return logits [1, m, choices] of the answered rows, and carried states."""
        raise NotImplementedError

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def lm_head_rows(lm_head: nn.Module, ids: Tensor) -> nn.Linear:
    """Make an LM head of the rows `ids` of another, in the type they are stored in."""
    weight, bias = lm_head.weight, lm_head.bias
    assert isinstance(weight, Tensor)
    cut = nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
    cut.weight = nn.Parameter(weight.detach()[ids].clone(), requires_grad=False)
    if isinstance(bias, Tensor):
        cut.bias = nn.Parameter(bias.detach()[ids].clone(), requires_grad=False)
    return cut


def _equal(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.shape != other.shape:
        return False
    return torch.equal(one.float(), other.detach().float())
