"""How an EAGLE or MTP head is trained: EAGLE-3 and MTP over the steps of a draft."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.folder import checkpoint_folder
from jetdraft.checkpoints.heads.head_reader import has_own_head, load_head
from jetdraft.checkpoints.layers import decoder_layers, vocabulary_tensors
from jetdraft.checkpoints.parameters import store_weights_in
from jetdraft.errors import OptionError
from jetdraft.methods.eagle import module
from jetdraft.methods.eagle.module import Eagle, EagleConfig, Mtp
from jetdraft.options import setting
from jetdraft.train import heads
from jetdraft.train.task import Contents, Run, Tensors
from jetdraft.train.teacher import Lesson, shift_rows

EAGLE1, EAGLE3, MTP = "eagle1", "eagle3", "mtp"
KINDS = (EAGLE3, EAGLE1, MTP)
ARCHITECTURES = {EAGLE1: "LlamaForCausalLMEagle", EAGLE3: "LlamaForCausalLMEagle3"}
# EAGLE-1's weight of the cross entropy, and the width of its noise on features.
CROSS_ENTROPY, NOISE_WIDTH = 0.1, 0.2


@dataclass(frozen=True)
class EagleSettings(heads.HeadSettings):
    """Settings of a head; EAGLE-1 learns one step, and validates more.

    draft_vocabulary: Tokens that EAGLE-3 can draft, the most frequent in the data.
    taps: Layers whose inputs EAGLE-3 reads, for example 2,12,21.
    inner: Width inside an EAGLE head's MLP.
    """

    kind: str = setting(EAGLE3, f"The kind of head: {', '.join(KINDS)}.", choices=KINDS)
    draft_vocabulary: int = setting(
        32000, allowed=(1, 10**7), names=("--draft-vocab",), group="drafting"
    )
    taps: tuple[int, ...] = setting(
        (), metavar="LAYERS", unset="2, the middle and the last but two"
    )
    inner: int = setting(0, allowed=(0, 10**6), unset="the target's")


class EagleTask(heads.HeadTask):
    """Trains EAGLE-3, MTP, or EAGLE-1, which learns features too.

    MTP begins with the target's head (FastMTP, 2509.18362) or a copy of its last layer.
    """

    Settings = EagleSettings
    help = "Train a head that drafts for TARGET, a checkpoint folder or hub id."
    product = "a head"
    fixed: Mapping[str, Tensor] = MappingProxyType({})
    """The tensors of an MTP head that are not trained, by name: biases of experts."""

    def check(self, run: Run) -> None:
        settings, plain = self.settings, EagleSettings()
        own = "inner", "taps", "draft_vocabulary"
        is_given = any(getattr(settings, n) != getattr(plain, n) for n in own)
        if settings.kind == MTP and is_given:
            fact = "an MTP head has a layer of the target and all its tokens"
            raise OptionError(f"{fact}; leave --inner, --taps and --draft-vocab out")
        if settings.kind != EAGLE3:
            return
        layers = len(decoder_layers(run.target.model))
        self.taps = tuple(self.settings.taps) or (2, layers // 2, layers - 3)
        if any(not 0 <= tap < layers for tap in self.taps):
            raise OptionError(
                f"the taps {list(self.taps)} are not all layers of this target; give "
                f"--taps with numbers from 0 to {layers - 1}"
            )

    def new_drafter(self, run: Run) -> Eagle:
        """Set `ids` and `config`, and make a head; EAGLE-3's LM head is a copy."""
        settings, target = self.settings, run.target
        if settings.kind == MTP:
            return self._new_mtp(target)
        is_third = settings.kind == EAGLE3
        if is_third:
            self.ids = run.frequent_tokens(settings.draft_vocabulary)
        size = target.vocab_size if self.ids is None else len(self.ids)
        own = {"draft_vocab_size": size, "taps": self.taps}
        own |= {"final_norm": is_third, "eagle3": is_third}
        self.config = heads.make_config(target, EagleConfig, settings.inner, **own)
        head = Eagle(self.config, target.model)
        head.ids = self.ids
        if is_third:
            rows = target.model.get_output_embeddings().weight.detach().float()
            head.lm_head = nn.Linear(self.config.hidden_size, size, bias=False)
            head.lm_head.weight.data.copy_(rows if self.ids is None else rows[self.ids])
        return head

    def _new_mtp(self, target: Checkpoint) -> Eagle:
        """Load the target's own MTP head, or make one; sets `config` and `fixed`."""
        folder = checkpoint_folder(target.source)
        if has_own_head(folder):
            head = load_head(str(folder), target, torch.float32)
            assert isinstance(head, Mtp)
            store_weights_in(head, torch.float32)
        else:
            head = Mtp(module.mtp_config(target), target.model)
            names = head.first_layer.state_dict().keys()
            for layer in decoder_layers(target.model):
                if layer.state_dict().keys() == names:  # the last such layer stays
                    heads.copy_weights(head.first_layer, layer)
        self.config = head.config
        learned = dict(head.named_parameters(remove_duplicate=False))
        self.fixed = {n: t for n, t in head.state_dict().items() if n not in learned}
        return head

    def predictions(
        self, drafter: Eagle, lesson: Lesson, learns: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        features, steps = drafter.fuse(lesson.taps), self.settings.unrolled
        if self.settings.kind == EAGLE1 and learns:
            features = features + (torch.rand_like(features) - 0.5) * NOISE_WIDTH
            steps = 1
        for hidden, carried in heads.unroll(drafter, lesson.ids, features, steps):
            yield carried, drafter.lm_head(hidden)

    def losses(self, step: int, state: Tensor, scores: Tensor, lesson: Any) -> Tensor:
        """Return the cross entropy; for EAGLE-1 a tenth, plus the features' loss."""
        losses = super().losses(step, state, scores, lesson)
        if self.settings.kind != EAGLE1:
            return losses
        wanted = shift_rows(lesson.final, 1 + step)
        apart = F.smooth_l1_loss(state, wanted, reduction="none").mean(-1)
        return apart + CROSS_ENTROPY * losses

    def description(self, run: Run) -> str:
        tokens = f"{self.config.draft_vocab_size} tokens"
        return f"a head ({self.settings.kind}) over {tokens}"

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        config, half = self.config, self.settings.half
        is_third = self.settings.kind == EAGLE3
        if self.settings.kind == MTP:
            whole = {**weights, **self.fixed}
            _, tensors = heads.stored_tensors(whole, half, module.stored_name)
            return {module.HIDDEN_FIRST: config.hidden_first}, tensors
        kinds = [ARCHITECTURES[self.settings.kind]]
        own = {"architectures": kinds, "model_type": "llama"}
        fields, tensors = heads.layer_contents(config, weights, half, **own)
        if not is_third:
            return fields | {"bias": config.fc_bias}, tensors
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
        if self.ids is not None:
            tensors |= vocabulary_tensors(self.ids, config.vocab_size)
        outputs = {"eagle_aux_hidden_state_layer_ids": [t - 1 for t in config.taps]}
        fields["eagle_config"] = outputs | {"use_aux_hidden_state": True}
        return fields | {"draft_vocab_size": config.draft_vocab_size}, tensors
