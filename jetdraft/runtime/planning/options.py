"""How to generate, checked before anything runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

from jetdraft.contracts.constants import CANDIDATES
from jetdraft.devices.providers import HALVES, check_on_cpu
from jetdraft.errors import OptionError
from jetdraft.options import Flag, Range, check_ranges, range_between
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.split.exit_head import FIELD, ExitHead, ExitRule
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.runtime.sampling.chooser import Sampling
from jetdraft.runtime.sampling.processors import Penalties
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.stops import Ending

_PROBABILITY = Range(lambda p: 0.0 <= p <= 1.0, "0 to 1 (never)", optional=True)
_EXIT_RANGES = {"stop_threshold": _PROBABILITY, "exit_threshold": _PROBABILITY}

THRESHOLD = 0.7
"""Both thresholds where a generation gives no threshold."""


@dataclass(frozen=True)
class Exiting:
    """Stop and Exit (SEC, 2401.09964), which is lossy and off by default.

    `stop_and_exit` is the folder of a head that `jetdraft train sec` wrote. It stops
    the text where it is surer than `stop_threshold` that the next token will be wrong,
    and leaves the upper layers out where it is surer than `exit_threshold` that the
    lower layers know the token; without them it is `THRESHOLD`.
    """

    stop_and_exit: str | Path | None = None
    stop_threshold: float | None = None
    exit_threshold: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop_and_exit, (str, Path, type(None))):
            raise OptionError(
                f"stop and exit {self.stop_and_exit!r} is not a path; give the folder "
                "of a head",
                FIELD,
            )
        check_ranges(self, _EXIT_RANGES)
        for name in _EXIT_RANGES if self.stop_and_exit is None else ():
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name.replace('_', ' ')} has no meaning without a head; give "
                    "stop and exit too, or leave it out",
                    name,
                )

    def rule(self, parts: LoadedBundle) -> ExitRule | None:
        """The rule that decides after the lower layers; None without a head.

        Raises `OptionError` or `PairError` for a head that does not fit the bundle.
        """
        if self.stop_and_exit is None:
            return None
        cut = parts.bundle.target.halves
        if cut is None or cut.exit is None:
            raise OptionError(
                "the bundle has no exit; export with --exit-after, or leave stop and "
                "exit out",
                FIELD,
            )
        fix = "choose --provider cpu, or leave stop and exit out"
        check_on_cpu(HALVES, parts.provider, fix, FIELD)
        layer = len(parts.bundle.target.contract.kv_shapes) - cut.layers
        head = ExitHead.load(Path(self.stop_and_exit), cut.base, layer, cut.hidden_size)
        thresholds = (self.stop_threshold, self.exit_threshold)
        return ExitRule(head, *(THRESHOLD if t is None else t for t in thresholds))


def _method_help() -> str:
    """The help of `--method`, with the names of all methods."""
    return f"{', '.join((AUTO, NONE, *methods()))}; or a comma list to pick from."


_ending, _drafting, _sampling, _constraint = (
    partial(Flag, group) for group in ("ending", "drafting", "sampling", "constraint")
)
"""Flags in each section of help."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Model.generate`; `Options` explains them."""

    max_new_tokens: Annotated[
        int,
        _ending(
            "The most tokens of a text.", names=("-n", "--max-new-tokens"), least=1
        ),
    ]
    stop: Annotated[
        str | Sequence[str] | None,
        _ending("End before this text; may be given several times.", metavar="TEXT"),
    ]
    max_seconds: float | None
    ignore_eos: Annotated[bool, _ending("Continue past end of text.")]
    method: Annotated[str, _drafting(_method_help)]
    num_draft_tokens: Annotated[
        int | None,
        _drafting(
            "Draft this many tokens a round, at most this many with several methods; "
            "default: adaptive."
        ),
    ]
    drafting: Annotated[
        Mapping[str, object] | MethodOptions,
        _drafting(
            "Set an option of the method, for example tree=best of draft; may be given "
            "several times. An unknown KEY lists the keys of the method.",
            metavar="KEY=VALUE",
            kind=str,
            multiple=True,
        ),
    ]
    exact: Annotated[
        bool, _drafting("Use only pass widths whose rows agree bit by bit.")
    ]
    stop_and_exit: Annotated[
        str | Path | None,
        _drafting(
            "Let this head end a text that goes wrong, and leave layers out where it "
            "may: jetdraft train sec makes it. Lossy, so it needs --no-exact.",
            metavar="HEAD",
        ),
    ]
    stop_threshold: float | None
    exit_threshold: float | None
    temperature: Annotated[
        float,
        _sampling(
            "Temperature of sampling; 0 always takes the most likely token. Default: "
            "the checkpoint's own in generate and chat, otherwise 0."
        ),
    ]
    top_k: Annotated[
        int, _sampling("Sample from this many of the most likely tokens; 0 is off.")
    ]
    top_p: Annotated[
        float,
        _sampling(
            "Sample from the most likely tokens up to this total probability; 1 is off."
        ),
    ]
    min_p: Annotated[
        float,
        _sampling("Drop tokens below this share of the highest probability; 0 is off."),
    ]
    seed: Annotated[
        int | None,
        _sampling(
            "Seed of the random numbers; the same seed gives the same text. Default: "
            "random in generate and chat, otherwise 0."
        ),
    ]
    logit_bias: Mapping[int, float] | None
    repetition_penalty: Annotated[
        float,
        _sampling(
            "Divide the logits of earlier tokens by this; 1 is off. Default: the "
            "checkpoint's own, or 1."
        ),
    ]
    presence_penalty: float
    frequency_penalty: float
    json_schema: Annotated[
        str | Mapping[str, Any] | None,
        _constraint(
            "Write JSON that follows the JSON schema in this file.",
            metavar="FILE",
            kind=Path,
        ),
    ]
    regex: Annotated[
        str | None, _constraint("Write a text that matches this expression.")
    ]
    grammar: Annotated[
        str | None,
        _constraint(
            "Write a text that follows the grammar in this file, in Lark's notation.",
            metavar="FILE",
            kind=Path,
        ),
    ]
    logprobs: int | None


_RANGES = {"logprobs": range_between(0, CANDIDATES, optional=True)}
_DRAFTING_FIELDS = ("method", "num_draft_tokens", "exact")
_CONSTRAINT_FIELDS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True)
class Options:
    """How to generate. Each part checks itself and raises `OptionError`.

    sampling    how a token is chosen, see `Sampling`
    penalties   what is added to logits or taken from them, see `Penalties`
    drafting    which methods draft, and with which options, see `Drafting`
    ending      when the text ends, see `Ending`
    constraint  a JSON schema, a regular expression or a grammar (Lark's notation) that
                the text must match; `max_new_tokens` may end the text before
    exiting     whether a head may stop the text or skip layers, see `Exiting`
    logprobs    give the log probability of each token, and of this many best tokens

        Options.of(max_new_tokens=64, temperature=0.8, drafting={"tree": "best"})
    """

    sampling: Sampling = Sampling()
    penalties: Penalties = Penalties()
    # A factory, since `Drafting` loads the packages of methods, which import jetdraft.
    drafting: Drafting = field(default_factory=Drafting)
    ending: Ending = Ending()
    exiting: Exiting = Exiting()
    constraint: Constraint | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for part in (Sampling, Penalties, Drafting, Ending, Exiting, Constraint):
            name = part.__name__.lower()
            absent = part is Constraint and self.constraint is None
            if not absent and not isinstance(getattr(self, name), part):
                raise OptionError(
                    f"{name} must be a {part.__name__}; Options.of makes it of the "
                    "options by name",
                    name,
                )
        check_ranges(self, _RANGES)
        exits = self.exiting.stop_and_exit is not None
        if exits and self.drafting.exact:
            raise OptionError(
                "stop and exit keeps neither the text nor the distribution of plain "
                "decoding; add --no-exact (exact=False)",
                FIELD,
            )
        if exits and self.drafting.select_kv:
            raise OptionError(
                "stop and exit runs the target in two halves, which read all KV rows; "
                "leave stop and exit or select_kv out",
                FIELD,
            )
        if self.constraint is not None and self.ending.ignore_eos:
            raise OptionError(
                f"a text with a {self.constraint.kind} ends by itself; leave ignore "
                "eos out",
                "ignore_eos",
            )

    @property
    def lossy(self) -> str:
        """What may change the distribution of the text; "" for nothing."""
        verifier = self.drafting.checker
        reasons = {
            f"verifier {verifier.name}": verifier.lossy,
            "stop and exit": self.exiting.stop_and_exit is not None,
            "selected KV rows": self.drafting.select_kv,
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)

    @property
    def is_truncated(self) -> bool:
        """Whether answers lack layers or KV rows, so that nothing learns from them."""
        return self.exiting.stop_and_exit is not None or self.drafting.select_kv

    @classmethod
    def of(cls, **options: Unpack[GenerateOptions]) -> Options:
        """Make options from the keywords of `GenerateOptions`; raises `OptionError`.

        Without a `seed`, or with None, a random seed is drawn for a sampled text.
        """
        rest: dict[str, Any] = dict(options)

        def take(part: type[Any] | Sequence[str]) -> dict[str, Any]:
            names = [f.name for f in fields(part)] if isinstance(part, type) else part
            return {name: rest.pop(name) for name in names if name in rest}

        settings, sampling = rest.pop("drafting", {}), take(Sampling)
        if sampling.get("seed") is None:
            sampled = bool(sampling.get("temperature"))
            sampling["seed"] = secrets.randbits(32) if sampled else 0
        parts = {
            "sampling": Sampling(**sampling),
            "penalties": Penalties(**take(Penalties)),
            "ending": Ending(**take(Ending)),
            "exiting": Exiting(**take(Exiting)),
            "drafting": Drafting(**take(_DRAFTING_FIELDS), settings=settings),
            "constraint": Constraint.of(**take(_CONSTRAINT_FIELDS)),
            "logprobs": rest.pop("logprobs", None),
        }
        for name in rest:
            raise OptionError(f"unknown option {name!r}; see Options", str(name))
        return cls(**parts)
