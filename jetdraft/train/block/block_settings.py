"""What drafter of blocks to train, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.errors import OptionError

FORWARD_KL, TEXT = "forward-kl", "text"
LOSSES = (FORWARD_KL, TEXT)


@dataclass(frozen=True)
class BlockSettings:
    """What all drafters of blocks have.

    A block has `block_rows` rows. They are masks, but a DFlash head's first row is the
    last token. In each sequence `anchors` blocks are learned in one pass; in
    `known_share` of them the first tokens are known, as in a second step of a draft.
    The `loss` compares a guess with the target, or with the text. With `regenerate` the
    target writes the texts.
    """

    layers: int | None = None
    block_rows: int = 8
    anchors: int = 16
    known_share: float = 0.25
    loss: str = FORWARD_KL
    regenerate: bool = False
    half: bool = False
    """Whether the drafter is written in float16."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise OptionError(
                f"unknown loss {self.loss!r} of a block; choose {' or '.join(LOSSES)}",
                "loss",
            )
        self.check_ranges(
            ("layers", self.layers, 1, 100),
            ("block rows", self.block_rows, 2, 64),
            ("anchors", self.anchors, 1, 10**4),
            ("known share", self.known_share, 0.0, 1.0),
        )

    @staticmethod
    def check_ranges(*ranges: tuple[str, float | None, float, float]) -> None:
        """Raise `OptionError` for the first value of a name outside its range."""
        for name, value, least, most in ranges:
            if value is not None and not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )


@dataclass(frozen=True)
class DFlashSettings(BlockSettings):
    """A DFlash head; `taps` are the layers whose outputs it reads.

    DFlashSettings(layers=2, block_rows=8)
    """

    taps: Sequence[int] = ()


@dataclass(frozen=True)
class DiffusionSettings(BlockSettings):
    """A diffusion drafter as wide as `hidden_size`, by default half of the target.

    DiffusionSettings(layers=2, hidden_size=192)
    """

    hidden_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(("hidden size", self.hidden_size, 16, 10**5))
        if self.hidden_size is not None and self.hidden_size % 16:
            raise OptionError(
                f"hidden size {self.hidden_size} has no heads of 16 numbers; give a "
                "multiple of 16"
            )


@dataclass(frozen=True)
class SourceBlockSettings(BlockSettings):
    """A drafter of an encoder-decoder, with `layers` layers in its decoder.

    Of the tokens of a block that it would guess wrong, a share of `glancing` is told,
    which falls to nothing in the course of the training (GLAT, 2008.07905).

        SourceBlockSettings(layers=2, block_rows=8)
    """

    glancing: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(("glancing", self.glancing, 0.0, 1.0))
