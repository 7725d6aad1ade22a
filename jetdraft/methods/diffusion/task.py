"""How a masked diffusion model that drafts is trained: `jetdraft train diffusion`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jetdraft.checkpoints.heads.blocks import BlockConfig
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.errors import OptionError
from jetdraft.methods.diffusion.module import MODEL_TYPE, Diffusion
from jetdraft.options import setting
from jetdraft.train.blocks import BlockSettings, BlockTask
from jetdraft.train.heads import layer_contents, make_config
from jetdraft.train.task import Contents, Run, Tensors

LAYERS = 2
SPREAD = 0.02  # The standard deviation of new embeddings, as in the first GPT.


@dataclass(frozen=True)
class DiffusionSettings(BlockSettings):
    hidden_size: int | None = setting(
        None, "Width of a new drafter.", (16, 10**5), unset="half of the target's"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size is not None and self.hidden_size % 16:
            fact = f"hidden size {self.hidden_size} has no heads of 16 numbers"
            raise OptionError(f"{fact}; give a multiple of 16")


class DiffusionTask(BlockTask):
    """A small model that reads the text itself, and fills a block of masks."""

    Settings = DiffusionSettings
    help = "Train a small diffusion model that fills a block behind TARGET's text."
    product = "a diffusion drafter"

    def new_config(self, run: Run) -> HeadConfig:
        """Make the config, by default two layers half as wide as the target."""
        whole = make_config(run.target, HeadConfig)
        width = self.settings.hidden_size or max(16, whole.hidden_size // 2 // 16 * 16)
        head_dim = next(size for size in (64, 32, 16) if width % size == 0)
        return make_config(
            run.target,
            BlockConfig,
            3 * width,
            hidden_size=width,
            target_hidden_size=width,
            num_layers=self.settings.layers or LAYERS,
            num_heads=width // head_dim,
            num_kv_heads=width // head_dim,
            head_dim=head_dim,
            rms_norm_eps=HeadConfig.rms_norm_eps,
            slots=self.settings.block_rows,
            qk_norm=True,
        )

    def new_drafter(self, run: Run) -> Diffusion:
        drafter = Diffusion(self.config, run.target.model)
        for weight in (drafter.embed_tokens.weight, drafter.mask):
            assert isinstance(weight, Tensor)
            nn.init.normal_(weight, std=SPREAD)
        return drafter

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        config, half = self.config, self.settings.half
        own = {"model_type": MODEL_TYPE, "block_size": config.slots}
        return layer_contents(config, weights, half, **own, tie_word_embeddings=True)
