"""What drafter model to train, and on what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jetdraft.errors import OptionError
from jetdraft.train.drafter.divergences import DIVERGENCES, FORWARD_KL, JENSEN_SHANNON

TEXT = "text"
"""The loss of a drafter that learns from the text alone."""

LOSSES = (*DIVERGENCES, TEXT)


@dataclass(frozen=True)
class ModelSettings:
    """What drafter to train.

    It has `layers` layers of `hidden_size`, by default what costs 5 % of a pass, or it
    starts as the checkpoint `start`, or as the target's own layers `from_layers`. The
    `loss` compares it with the target, and `beta` is the weight of Jensen-Shannon.
    With `regenerate` the target writes the texts, and `on_policy_share` of each batch
    is written by the drafter itself. `draft_vocab` is the most tokens that it can
    draft. Labels are kept in `cache`, `cache_tokens` of each place.

        ModelSettings(layers=2, hidden_size=192)
    """

    layers: int | None = None
    hidden_size: int | None = None
    start: str | None = None
    from_layers: tuple[int, ...] = ()
    loss: str = FORWARD_KL
    beta: float | None = None
    regenerate: bool = False
    on_policy_share: float = 0.0
    draft_vocab: int | None = None
    cache: Path | None = None
    cache_tokens: int = 64
    half: bool = False
    """Whether the drafter is written in float16."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise OptionError(
                f"unknown loss {self.loss!r}; choose {', '.join(LOSSES[:-1])} or "
                f"{LOSSES[-1]}",
                "loss",
            )
        for name, value, least, most in (
            ("layers", self.layers, 1, 1000),
            ("hidden size", self.hidden_size, 8, 10**6),
            ("beta", self.beta, 0.01, 0.99),
            ("on policy share", self.on_policy_share, 0.0, 1.0),
            ("draft vocabulary", self.draft_vocab, 1, 10**7),
            ("cache tokens", self.cache_tokens, 1, 10**6),
        ):
            if value is not None and not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )
        self._check_together()

    def _check_together(self) -> None:
        """Raise `OptionError` for settings that exclude each other."""
        if self.start is not None and self.from_layers:
            raise OptionError(
                "a drafter starts from a checkpoint or from the target's layers; give "
                "--from or --from-layers, not both"
            )
        started = self.start is not None or self.from_layers
        if started and (self.layers or self.hidden_size):
            raise OptionError(
                "a drafter that starts from weights has their sizes; leave --layers "
                "and --hidden-size out"
            )
        if self.beta is not None and self.loss != JENSEN_SHANNON:
            raise OptionError(
                f"loss {self.loss} has no beta; leave --beta out, or give --loss "
                f"{JENSEN_SHANNON}"
            )
        if self.loss == TEXT and self.on_policy_share:
            raise OptionError(
                "the loss text asks no target, so a drafter cannot learn from its own "
                "texts; leave --on-policy-share out, or give another --loss"
            )
        if self.cache is None and self.cache_tokens != type(self).cache_tokens:
            raise OptionError("--cache-tokens needs a folder; give --cache too")
        if self.cache is not None and (self.on_policy_share or self.loss == TEXT):
            raise OptionError(
                "the cache keeps what the target says of texts that come again; leave "
                "--cache out with --on-policy-share and with --loss text"
            )
