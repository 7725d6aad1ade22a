"""How to generate, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from jetdraft.contract import CANDIDATES
from jetdraft.errors import OptionError, VerifierError
from jetdraft.runtime.planning.drafting import AUTO, MAX_DRAFT_TOKENS, Drafting
from jetdraft.runtime.proposers.draft_stops import NAMES
from jetdraft.runtime.sampling.chooser import Sampling
from jetdraft.runtime.sampling.penalties import Penalties
from jetdraft.runtime.text.constraint import Constraint

NONE = "none"

_OPTIONAL = (
    "num_draft_tokens",
    "prune_threshold",
    "stop_threshold",
    "max_seconds",
    "logprobs",
)


@dataclass
class Options:
    """How to generate; the keyword arguments of `Model.generate`.

    `num_draft_tokens` None lets the controller choose the length each round. With
    several methods, as in "draft,lookup", or "auto" it chooses the proposer too.
    `exact` keeps to one class of pass widths, and to the text of plain decoding; other
    verifiers than the walk keep at most its distribution. For `tree`, `siblings`,
    `branching`, `tree_parents` and `verifier` see `Drafting`. `prune_threshold` drops
    drafted rows that an early exit thinks less likely, with method "stream"; "auto"
    follows measured times, None runs the target whole. `stopping` ("confidence",
    "product" or "learned") ends a drafter's draft where it doubts, by its own or the
    given `stop_threshold`.

    The text ends before any of the texts in `stop`, or after `max_seconds`. Logits are
    changed as `Penalties` says. `logprobs` asks for those of the tokens, and of so many
    others at each place. The text is JSON of a `json_schema`, or one of `regex`, or of
    `grammar` in Lark's notation, as far as `max_new_tokens` let it come.
    """

    max_new_tokens: int = 128
    method: str = AUTO
    num_draft_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    exact: bool = True
    tree: str = AUTO
    siblings: str = "coupled"
    branching: Sequence[int] | None = None
    tree_parents: Sequence[int] | None = None
    verifier: str = "walk"
    prune_threshold: float | str | None = None
    stopping: str | None = None
    stop_threshold: float | None = None
    stop: str | Sequence[str] | None = None
    max_seconds: float | None = None
    logit_bias: Mapping[int, float] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    sampling: Sampling = field(init=False)
    shaping: Penalties = field(init=False)
    drafting: Drafting = field(init=False)
    constraint: Constraint | None = field(init=False)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names in `method`."""
        return tuple(name.strip() for name in self.method.split(","))

    def __post_init__(self) -> None:
        self._check_types()
        if len(self.methods) > 1 and {NONE, AUTO} & set(self.methods):
            raise OptionError(
                f"method {self.method!r} mixes {NONE} or {AUTO} with others; list "
                "proposers only"
            )
        if len(set(self.methods)) < len(self.methods):
            raise OptionError(f"method {self.method!r} names one twice; name each once")
        if self.max_new_tokens < 1:
            raise OptionError(
                f"max new tokens {self.max_new_tokens} is out of range; give 1 or more"
            )
        count = self.num_draft_tokens
        if count is not None and not 1 <= count <= MAX_DRAFT_TOKENS:
            raise OptionError(
                f"num draft tokens {count} is out of range; "
                f"give 1 to {MAX_DRAFT_TOKENS}"
            )
        self.sampling = Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.seed
        )
        self.shaping = Penalties(
            self.logit_bias or {},
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        self.constraint = Constraint.of(self.json_schema, self.regex, self.grammar)
        self._check_ending()
        self.drafting = Drafting(
            self.tree, self.siblings, self.branching, self.tree_parents, self.verifier
        )
        self._check_drafting()

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _check_ending(self) -> None:
        """Refuse what could not end a text, or would end all."""
        listed = isinstance(self.stop, (str, list, tuple, type(None)))
        if not listed or not all(isinstance(stop, str) for stop in self.stops):
            raise OptionError(f"stop {self.stop!r} is no list of texts; give texts")
        if "" in self.stops:
            raise OptionError("a stop string is empty; give at least one character")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise OptionError(
                f"max seconds {self.max_seconds} is out of range; give more than 0"
            )
        if self.constraint is not None and self.ignore_eos:
            raise OptionError(
                f"a text of a {self.constraint.kind} ends by itself; leave ignore eos "
                "out"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= CANDIDATES:
            raise OptionError(
                f"logprobs {self.logprobs} is out of range; give 0 to {CANDIDATES}"
            )

    def _check_types(self) -> None:
        """Programs may pass anything; the command line has checked its own."""
        for name, kind, what in (
            ("max_new_tokens", Integral, "an integer"),
            ("num_draft_tokens", Integral, "an integer"),
            ("top_k", Integral, "an integer"),
            ("seed", Integral, "an integer"),
            ("temperature", Real, "a number"),
            ("top_p", Real, "a number"),
            ("min_p", Real, "a number"),
            ("prune_threshold", Real, "a number"),
            ("stop_threshold", Real, "a number"),
            ("max_seconds", Real, "a number"),
            ("repetition_penalty", Real, "a number"),
            ("presence_penalty", Real, "a number"),
            ("frequency_penalty", Real, "a number"),
            ("logprobs", Integral, "an integer"),
        ):
            given = getattr(self, name)
            optional = given is None and name in _OPTIONAL
            optional = optional or (name == "prune_threshold" and given == AUTO)
            if not optional and (
                isinstance(given, bool) or not isinstance(given, kind)
            ):
                raise OptionError(f"{name} {given!r} is not {what}; give {what}")
        if not isinstance(self.logit_bias, (Mapping, type(None))):
            raise OptionError(
                f"logit_bias {self.logit_bias!r} is no mapping; give {{id: number}}"
            )
        if not isinstance(self.method, str):
            raise OptionError(
                f'method {self.method!r} is not a text; give one, as in "draft,lookup"'
            )

    def _check_drafting(self) -> None:
        """Refuse options that contradict each other."""
        drafting, count = self.drafting, self.num_draft_tokens
        if self.method == NONE and count is not None:
            raise OptionError(
                f"num draft tokens {count} means nothing with method none; leave one "
                "of them out"
            )
        if self.method == NONE and self.verifier != "walk":
            raise OptionError(
                f"verifier {self.verifier!r} means nothing with method none; leave one "
                "of them out"
            )
        if self.exact and self.verifier != "walk":
            keeps = (
                "neither the text nor the distribution"
                if drafting.checker.lossy
                else "the distribution but not the text"
            )
            raise VerifierError(
                f"verifier {self.verifier!r} keeps {keeps} of plain decoding; add "
                "--no-exact (exact=False)"
            )
        if not drafting.is_chain and self.method not in ("draft", "stream"):
            raise OptionError(
                f"a {self.tree} tree is drafted by method draft or stream, not "
                f"{self.method}"
            )
        threshold = self.prune_threshold
        if threshold is not None and self.method != "stream":
            raise OptionError(
                f"prune threshold {threshold} means something with method stream only; "
                "leave it out"
            )
        checker = drafting.checker
        if threshold is not None and not checker.lossy and self.verifier != "walk":
            raise VerifierError(
                f"verifier {self.verifier!r} is not exact for what is left of a pruned "
                "draft; leave the prune threshold out"
            )
        kept = threshold in (None, AUTO, 2.0) or 0.0 <= float(threshold) <= 1.0
        if not kept:
            raise OptionError(
                f"prune threshold {threshold} is out of range; give 0 (keep all) to 1, "
                "or 2 (drop all)"
            )
        self._check_stopping()
        sized = self.branching is not None or self.tree_parents is not None
        if sized and self.num_draft_tokens is not None:
            raise OptionError(
                f"the {self.tree} tree has its own size; leave num draft tokens out"
            )

    def _check_stopping(self) -> None:
        """Refuse a rule that is unknown or that nothing would follow."""
        if self.stopping is None:
            if self.stop_threshold is not None:
                raise OptionError("a stop threshold needs a stopping rule; give both")
            return
        if self.stopping not in NAMES:
            raise OptionError(
                f"unknown stopping {self.stopping!r}; choose {', '.join(NAMES)}"
            )
        if not {"draft", AUTO} & set(self.methods) or not self.drafting.is_chain:
            raise OptionError(
                f"stopping {self.stopping!r} ends the chains of method draft; leave it "
                "out"
            )
        threshold = self.stop_threshold
        if threshold is not None and not 0.0 <= threshold <= 1.0:
            raise OptionError(
                f"stop threshold {threshold} is out of range; give 0 to 1"
            )
