"""Which methods draft in a generation, how much, and with which options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from jetdraft.contracts.tensors import WIDEST
from jetdraft.errors import DraftingError, OptionError, check_choice
from jetdraft.options import between, check_fields
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import WALK, MethodOptions
from jetdraft.runtime.sampling.verifiers import VERIFIERS, Verifier

MAX_DRAFT_TOKENS = WIDEST - 1  # The widest decoding pass without the root.


@dataclass(frozen=True)
class Drafting:
    """How a generation drafts; raises `OptionError` where options contradict.

    method            "auto", "none", or names of methods, for example "draft,lookup"
    num_draft_tokens  the length of every draft; None lets a controller choose it, and
                      with several methods it is the longest draft
    exact             keep to the text of plain decoding, bit for bit
    prediction        a text that the answer may repeat, which lookup drafts from
    settings          options of the methods by name, or an options object of one method

        Drafting("auto", num_draft_tokens=4, settings={"verifier": "walk"})
    """

    method: str = AUTO
    num_draft_tokens: Annotated[int | None, between(1, MAX_DRAFT_TOKENS)] = None
    exact: bool = True
    prediction: str = ""
    settings: Mapping[str, object] | MethodOptions = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            fact = f"method {self.method!r} is not a text"
            raise OptionError(f'{fact}; give, for example, "draft,lookup"', "method")
        if not isinstance(self.settings, (Mapping, MethodOptions)):
            fact = f"drafting {self.settings!r} is not a mapping; give one"
            raise DraftingError(fact + ', for example {"tree": "best"}')
        if not isinstance(self.prediction, str):
            problem = f"prediction {self.prediction!r} is not a text; give a text"
            raise OptionError(problem, "prediction")
        check_fields(self)
        if self.select_kv and self.exact:
            fact = "select_kv reads a part of the KV rows, so the text may differ from "
            fact += "plain decoding; add --no-exact (exact=False)"
            raise DraftingError(fact)
        self._check_names()
        for name, options in self.options.items():
            self._check_options(name, options)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `method`."""
        return tuple(name.strip() for name in self.method.split(","))

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of each method that may draft, by name; raises `OptionError`."""
        if self.names == (NONE,):
            count = self.num_draft_tokens
            length = {} if count is None else {"num_draft_tokens": count}
            for key in {**self._given_options, **length}.keys() - {"user", "select_kv"}:
                fact = f"{key.replace('_', ' ')} has no meaning with method none"
                field = key if key in length else "drafting"
                raise OptionError(f"{fact}; leave one of them out", field)
            return {}
        registered = methods()
        names = registered if self.names == (AUTO,) else self.names
        types = {name: registered[name].options for name in names}
        own_type = type(self.settings)
        if issubclass(own_type, MethodOptions) and own_type not in types.values():
            fact = f"{own_type.__name__} are not options of method {self.method}"
            raise DraftingError(f"{fact}; give options of that method")
        keys_of = {name: options.option_names() for name, options in types.items()}
        all_keys = dict.fromkeys(key for keys in keys_of.values() for key in keys)
        given = self._given_options
        for key in given:
            check_choice(DraftingError, "drafting option", key, all_keys)
        options = {
            name: types[name].of({k: given[k] for k in keys if k in given})
            for name, keys in keys_of.items()
        }
        if self.names != (AUTO,):
            return options
        # A method that "auto" leaves out must not bind the others by its defaults.
        return {name: o for name, o in options.items() if registered[name].in_auto(o)}

    @property
    def _given_options(self) -> Mapping[str, object]:
        """The options that were set, by name; an object's defaults are left out."""
        settings = self.settings
        if isinstance(settings, Mapping):
            return settings
        default = vars(type(settings)())
        return {k: v for k, v in vars(settings).items() if v != default[k]}

    @property
    def checker(self) -> Verifier:
        """The verifier that all methods of a generation share, with its own options."""
        return next((o.checker for o in self.options.values()), VERIFIERS[WALK])

    @cached_property
    def _shared(self) -> MethodOptions:
        """The options `user` and `select_kv`, which work with any method or none."""
        names = self._given_options.keys() & {"user", "select_kv"}
        return MethodOptions.of({name: self._given_options[name] for name in names})

    @property
    def user(self) -> str:
        """The user that all methods of a generation share; "" without a name."""
        return self._shared.user

    @property
    def select_kv(self) -> bool:
        """Whether passes read selected KV rows only, with any method or none."""
        return self._shared.select_kv

    @property
    def may_ask_drafter(self) -> bool:
        """Whether a method may need the drafter: only drafts that are free never do."""
        return any(methods()[name].cost != "free" for name in self.options)

    def _check_names(self) -> None:
        names, known, problem = self.names, (AUTO, NONE, *methods()), ""
        if len(names) > 1 and {NONE, AUTO} & set(names):
            problem = f"mixes {NONE} or {AUTO} with others; list methods only"
        elif len(set(names)) < len(names):
            problem = "names a method twice; name it once"
        if problem:
            raise OptionError(f"method {self.method!r} {problem}", "method")
        for name in names:
            check_choice(OptionError, "method", name, known, "method")

    def _check_options(self, name: str, options: MethodOptions) -> None:
        """Raise `OptionError` for options that contradict the rest of a generation."""
        if self.exact and options.verifier != WALK:
            keeps = "the distribution but not the text"
            if options.checker.lossy:
                keeps = "neither the text nor the distribution"
            fact = f"verifier {options.verifier!r} keeps {keeps} of plain decoding"
            raise DraftingError(f"{fact}; add --no-exact (exact=False)")
        if options.draft_size is not None and self.names != (name,):
            fact = f"a draft of a fixed shape needs one method; give --method {name}"
            raise DraftingError(fact)
        if options.size_is_fixed and self.num_draft_tokens is not None:
            fact = "the tree has its own size; leave num draft tokens out"
            raise OptionError(fact, "num_draft_tokens")
