"""How a DFlash head is trained: `jetdraft train dflash`."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from jetdraft.checkpoints.heads.blocks import BlockConfig
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import OptionError
from jetdraft.methods.dflash.module import Dflash, default_output_layers
from jetdraft.options import setting
from jetdraft.train.blocks import BlockSettings, BlockTask
from jetdraft.train.heads import layer_contents, make_config
from jetdraft.train.task import Contents, Run, Tensors

# The layers of the published heads, and the taps of a head with one layer or two.
MAX_LAYERS, FEWEST_TAPS = 5, 3


@dataclass(frozen=True)
class DFlashSettings(BlockSettings):
    """Settings of a DFlash head, whose first row of a block is the last token.

    taps: Layers whose outputs the head reads, for example 1,9,17.
    """

    taps: tuple[int, ...] = setting((), metavar="LAYERS", unset="spread evenly")


class DFlashTask(BlockTask):
    """A head that fills a block from the target's states, in its authors' layout."""

    Settings = DFlashSettings
    help = "Train a head that fills a block behind TARGET's states."
    product = "a DFlash head"

    def new_config(self, run: Run) -> HeadConfig:
        """Make the config, by default with a seventh of the target's layers."""
        settings, depth = self.settings, len(decoder_layers(run.target.model))
        layers = settings.layers or min(MAX_LAYERS, max(1, round(depth / 7)))
        spread = default_output_layers(max(FEWEST_TAPS, layers), depth)
        outputs = sorted(set(settings.taps or spread))
        # Teachers give the last layer's output normed, which a head does not read.
        if any(not 0 <= output < depth - 1 for output in outputs):
            raise OptionError(
                f"the taps {list(outputs)} are not outputs of layers that a head can "
                f"read; give --taps with numbers from 0 to {depth - 2}"
            )
        return make_config(
            run.target,
            BlockConfig,
            num_layers=layers,
            taps=tuple(output + 1 for output in outputs),
            slots=settings.block_rows - 1,
            qk_norm=True,
        )

    def new_drafter(self, run: Run) -> Dflash:
        """Choose the mask, a token that texts lack, and make a new head."""
        ids = range(run.target.vocab_size)
        named = set(Tokenizer.from_str(run.target.tokenizer or "").get_vocab().values())
        counts = Counter(t for text in run.corpus.training for t in text.ids)
        mask = min(reversed(ids), key=lambda token: (token in named, counts[token]))
        self.config = replace(self.config, mask_token=mask)
        return Dflash(self.config, run.target.model)

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        config = self.config
        outputs = [tap - 1 for tap in config.taps]
        own = {"mask_token_id": config.mask_token, "target_layer_ids": outputs}
        return layer_contents(
            config,
            weights,
            self.settings.half,
            architectures=["DFlashDraftModel"],
            model_type="qwen3",
            block_size=config.slots + 1,
            num_target_layers=len(decoder_layers(run.target.model)),
            layer_types=["full_attention"] * config.num_layers,
            dflash_config=own,
        )
