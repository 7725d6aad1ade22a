"""How to generate, checked before anything runs."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.tensors import CANDIDATES
from jetdraft.errors import OptionError
from jetdraft.options import Flag, between, check_fields
from jetdraft.runtime.measured.stats import Stats
from jetdraft.runtime.passes.pictures import PictureInput, read_pictures
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.runtime.sampling.chooser import Sampling
from jetdraft.runtime.sampling.processors import Penalties
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.stops import Ending


def _method_help() -> str:
    return f"{', '.join((AUTO, NONE, *methods()))}; or a comma list to pick from."


_ending, _drafting, _sampling = (
    partial(Flag, group) for group in ("ending", "drafting", "sampling")
)
_file = partial(Flag, "constraint", metavar="FILE", kind=Path)


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Model.generate`; `Options` explains them.

    max_new_tokens: The most tokens of a text.
    stop: End before this text; may be given several times.
    max_thinking_tokens: End the thought of a chat model after this many tokens.
    ignore_eos: Continue past end of text.
    num_draft_tokens: Draft this many tokens a round, at most this many with several
        methods; default: adaptive.
    drafting: Set an option of the method, for example tree=best of draft; may be given
        several times. An unknown KEY lists the keys of the method.
    exact: Use only pass widths whose rows agree bit by bit.
    temperature: Temperature of sampling; 0 always takes the most likely token. Default:
        the checkpoint's own in generate and chat, otherwise 0.
    top_k: Sample from this many of the most likely tokens; 0 is off.
    top_p: Sample from the most likely tokens up to this total probability; 1 is off.
    min_p: Drop tokens below this share of the highest probability; 0 is off.
    seed: Seed of the random numbers; the same seed gives the same text. Default: random
        in generate and chat, otherwise 0.
    repetition_penalty: Divide the logits of earlier tokens by this; 1 is off. Default:
        the checkpoint's own, or 1.
    json_schema: Write JSON that follows the JSON schema in this file.
    regex: Write a text that matches this expression.
    grammar: Write a text that follows the grammar in this file, in Lark's notation.
    images: Show the model this image file; may be given several times.
    """

    max_new_tokens: Annotated[int, _ending(names=("-n", "--max-new-tokens"), least=1)]
    stop: Annotated[str | Sequence[str] | None, _ending(metavar="TEXT")]
    max_seconds: float | None
    max_thinking_tokens: Annotated[int | None, _ending(least=0)]
    ignore_eos: Annotated[bool, _ending()]
    method: Annotated[str, _drafting(_method_help)]
    num_draft_tokens: Annotated[int | None, _drafting()]
    drafting: Annotated[
        Mapping[str, object] | MethodOptions,
        _drafting(metavar="KEY=VALUE", kind=str, multiple=True),
    ]
    exact: Annotated[bool, _drafting()]
    prediction: str
    temperature: Annotated[float, _sampling()]
    top_k: Annotated[int, _sampling()]
    top_p: Annotated[float, _sampling()]
    min_p: Annotated[float, _sampling()]
    seed: Annotated[int | None, _sampling()]
    logit_bias: Mapping[int, float] | None
    repetition_penalty: Annotated[float, _sampling()]
    presence_penalty: float
    frequency_penalty: float
    json_schema: Annotated[str | Mapping[str, Any] | type[Any] | None, _file()]
    regex: Annotated[str | None, Flag("constraint")]
    grammar: Annotated[str | None, _file()]
    logprobs: int | None
    images: Annotated[
        Sequence[PictureInput],
        _ending(names=("--image",), metavar="FILE", kind=Path, multiple=True),
    ]


_DRAFTING_FIELDS = ("method", "num_draft_tokens", "exact", "prediction")
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
    logprobs    give the log probability of each token, and of this many best tokens
    images      uint8 [height, width, 3], in the order of their places in the prompt

        Options.of(max_new_tokens=64, temperature=0.8, drafting={"tree": "best"})
    """

    sampling: Sampling = Sampling()
    penalties: Penalties = Penalties()
    # A factory, since `Drafting` loads the packages of methods, which import jetdraft.
    drafting: Drafting = field(default_factory=Drafting)
    ending: Ending = Ending()
    constraint: Constraint | None = None
    logprobs: Annotated[int | None, between(0, CANDIDATES)] = None
    images: tuple[npt.NDArray[np.uint8], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for part in (Sampling, Penalties, Drafting, Ending, Constraint):
            name = part.__name__.lower()
            absent = part is Constraint and self.constraint is None
            if not absent and not isinstance(getattr(self, name), part):
                fact = f"{name} must be a {part.__name__}"
                fix = "Options.of makes it of the options by name"
                raise OptionError(f"{fact}; {fix}", name)
        check_fields(self)
        if self.constraint is not None and self.ending.ignore_eos:
            fact = f"a text with a {self.constraint.kind} ends by itself"
            raise OptionError(f"{fact}; leave ignore eos out", "ignore_eos")

    @property
    def lossy(self) -> str:
        """What may change the distribution of the text; "" for nothing."""
        verifier = self.drafting.checker
        reasons = {
            f"verifier {verifier.name}": verifier.lossy,
            "selected KV rows": self.drafting.select_kv,
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds)

    def stats(self, prompt_tokens: int, **more: Any) -> Stats:
        """New stats of a text with these options; `more` are further fields."""
        drafting, sampling = self.drafting, self.sampling
        seed = sampling.seed if sampling.temperature else None
        more |= {"seed": seed, "lossy": self.lossy}
        return Stats(drafting.method, drafting.exact, prompt_tokens, **more)

    @classmethod
    def of(cls, **options: Unpack[GenerateOptions]) -> "Options":
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
            "drafting": Drafting(**take(_DRAFTING_FIELDS), settings=settings),
            "constraint": Constraint.of(**take(_CONSTRAINT_FIELDS)),
            "logprobs": rest.pop("logprobs", None),
            "images": read_pictures(rest.pop("images", ())),
        }
        for name in rest:
            near = get_close_matches(str(name), GenerateOptions.__annotations__, 1)
            if name in ("max_tokens", "max_completion_tokens"):
                near = ["max_new_tokens"]
            hint = f"did you mean {near[0]}?" if near else "see Options"
            raise OptionError(f"unknown option {name!r}; {hint}", str(name))
        return cls(**parts)
