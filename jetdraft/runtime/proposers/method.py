"""A method of drafting: one record, registered once; and options of methods."""

import itertools
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from jetdraft.bundle import Bundle
from jetdraft.contracts.tensors import CANDIDATES, WIDEST
from jetdraft.errors import DraftingError, OptionError, check_choice
from jetdraft.options import at_least, between, check_fields
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Target
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.sampling.verifiers import TOLERANCE, TOP, VERIFIERS, Verifier
from jetdraft.runtime.trees.shapes import SHAPES, Kary, Shape, Static

WALK = "walk"  # The verifier that gives the text of plain decoding.


@dataclass(frozen=True)
class MethodOptions:
    """The options of every method; a method adds fields in a subclass.

    verifier   which drafted tokens are accepted, a name in `VERIFIERS`
    user       whose earlier responses are drafted from, and who keeps the new response
    select_kv  read only the KV rows that `export --select-kv` lets passes select: lossy
    top        verifier tolerant accepts one of that many best tokens, if its log
    tolerance  probability is at most this below the best token's

    Fields are of type str, int, float, bool, Path, tuple[int, ...], or a union of them.
    A text is read as the field's type. Raises `OptionError` for another type.

        MethodOptions.of({"verifier": "typical"})
    """

    verifier: str = WALK
    user: str = ""
    select_kv: bool = False
    top: typing.Annotated[int, between(1, CANDIDATES)] = TOP
    tolerance: typing.Annotated[float, at_least(0)] = TOLERANCE

    def __post_init__(self) -> None:
        for key, hint in _field_types(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, key, _read_value(key, getattr(self, key), hint))
        if refusal := next(self.refusals(), ""):
            raise DraftingError(refusal)

    def refusals(self) -> Iterator[str]:
        """Yield each contradiction with its fix; the first becomes an `OptionError`."""
        check_choice(DraftingError, "verifier", self.verifier, VERIFIERS)
        check_fields(self)
        for name in sorted({name for v in VERIFIERS.values() for name in v.settings}):
            changed = getattr(self, name) != getattr(MethodOptions, name)
            if changed and name not in VERIFIERS[self.verifier].settings:
                others = [v.name for v in VERIFIERS.values() if name in v.settings]
                fact = f"verifier {self.verifier!r} has no {name}"
                yield f"{fact}; leave it out, or give verifier={' or '.join(others)}"

    @property
    def checker(self) -> Verifier:
        """The `Verifier` that `verifier` names, with the values of its settings."""
        verifier = VERIFIERS[self.verifier]
        settings = {name: getattr(self, name) for name in verifier.settings}
        return verifier.with_settings(settings) if settings else verifier

    @property
    def draft_size(self) -> int | None:
        """The rows of every draft; here None: a controller chooses in each round."""
        return None

    @property
    def size_is_fixed(self) -> bool:
        """Whether `draft_size` is fixed, so that no caller can change it; here not."""
        return False

    @property
    def branched(self) -> bool:
        """Whether every draft branches; here not."""
        return False

    @property
    def may_branch(self) -> bool:
        """Whether a controller may ask for trees."""
        return self.verifier == WALK

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(option.name for option in fields(cls))

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> typing.Self:
        """Make options from `settings`; raises `OptionError` for an unknown key."""
        keys = cls.option_names()
        for key in settings:
            check_choice(DraftingError, "drafting option", key, keys)
        return cls(**settings)  # type: ignore[arg-type]


_field_types = cache(get_type_hints)

OptionsT = TypeVar("OptionsT", bound=MethodOptions)
OwnTarget = Callable[[LoadedBundle, OptionsT, Sequence[int]], Target | None]
# A draft costs nothing, a drafter's pass per token, or rows of the target's pass.
Cost = Literal["free", "drafter", "probes"]


# Equal by identity: a planner keeps a proposer for each method and its options.
@dataclass(frozen=True, eq=False)
class Method(Generic[OptionsT]):
    """How one method of drafting is named, made and used.

    name            what `--method` takes
    summary         where its drafts come from, in a few words
    make            makes a proposer for a loaded bundle; raises `OptionError`
                    with the reason where it cannot
    options         the type of its own options
    lacks           what an export must add to a bundle for this method; "" if nothing
    needs_store     whether it drafts from a store of responses, beside the bundle
    in_auto         whether "auto" may pick it, given its options
    trees           whether its options can ask for drafts of a fixed shape
    reads_probes    whether it reads the probes of the target's passes
    cost            what its drafts cost, for plans on devices that are not at hand;
                    None leaves it out of plans
    target          gives the target that verifies instead of the bundle's own, for the
                    allowed widths; it may give None, the bundle's own
    fills_target    whether its proposer writes drafts into the target's buffers, past
                    the committed rows, where another target may keep rows of a draft
    samples         options that `jetdraft check` tries beside the defaults
    module          its drafter as a torch module, "package.module:NAME", or several of
                    them; an export loads it when it reads a checkpoint
    task            how it is trained, "package.module:NAME"; `jetdraft train` loads it
    alone           the options with which an export measures how often the bundle's
                    drafter is right; None for a method that drafts without the drafter,
                    or not with it alone

        METHOD = Method("repeat", "the last token, again", lambda loaded, o: Repeat())
    """

    name: str
    summary: str
    make: Callable[[LoadedBundle, OptionsT], Proposer]
    options: type[OptionsT] = MethodOptions  # type: ignore[assignment]
    lacks: Callable[[Bundle], str] = lambda bundle: ""
    needs_store: bool = False
    in_auto: Callable[[OptionsT], bool] = lambda options: True
    trees: bool = False
    reads_probes: bool = False
    cost: Cost | None = None
    target: OwnTarget[OptionsT] | None = None
    fills_target: bool = False
    samples: tuple[Mapping[str, object], ...] = ()
    alone: Mapping[str, object] | None = None
    module: tuple[str, ...] = ()
    task: str = ""

    def __post_init__(self) -> None:
        options = self.options
        hints = {*_field_types(options)}  # type: ignore[arg-type]
        if not issubclass(options, MethodOptions) or hints - {*options.option_names()}:
            raise OptionError(
                f"{options.__name__}, the options of method {self.name!r}, must be a "
                "dataclass; write @dataclass(frozen=True) above "
                f"class {options.__name__}(MethodOptions)",
                "method",
            )
        options()  # refuses options whose defaults are refused
        if not self.name.replace("-", "").isalnum() or self.name in ("auto", "none"):
            fact = f"{self.name!r} cannot name a method; use letters, digits and dashes"
            raise OptionError(fact, "method")


def _integers(items: Sequence[Any]) -> tuple[int, ...]:
    """A tuple of ints, also from texts; raises `TypeError` or `ValueError`."""
    if any(isinstance(item, bool) for item in items):
        raise TypeError
    return tuple(int(item) if isinstance(item, str) else index(item) for item in items)


_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
# Per type of a field, in the order of trying: the Python types that it takes, how a
# value of them and a text are read, and the words for the type.
_READERS: dict[Any, tuple[Any, Callable[[Any], Any], Callable[[str], Any], str]] = {
    bool: (bool, bool, _BOOLEANS.__getitem__, "true or false"),
    int: (Integral, int, int, "an integer"),
    float: (Real, float, float, "a number"),
    Path: (Path, Path, Path, "a path"),
    tuple[int, ...]: (
        (list, tuple),
        _integers,
        lambda text: _integers(text.split(",")),
        "a list of integers, for example 2,1",
    ),
    str: (str, str, str, "a text"),
}


def _read_value(key: str, value: object, hint: Any) -> Any:
    """Read a text or a Python value as its field's type; raises `DraftingError`."""
    kinds = get_args(hint) if get_origin(hint) in (typing.Union, UnionType) else (hint,)
    if unreadable := {*kinds} - {*_READERS, NoneType}:
        fact = f"drafting option {key} has a field of type {unreadable.pop()}"
        raise DraftingError(f"{fact}; declare it with a type that MethodOptions lists")
    if value is None and NoneType in kinds:
        return None
    types = [_READERS[kind] for kind in _READERS if kind in kinds]
    for accepted, read, read_text, _ in types:
        flag = isinstance(value, bool) and accepted is not bool
        try:
            if isinstance(value, str):
                return read_text(value)
            if isinstance(value, accepted) and not flag:
                return read(value)
        except (TypeError, ValueError, KeyError):
            continue
    words = " or ".join(words for *_, words in types)
    raise DraftingError(f"drafting option {key} cannot be {value!r}; give {words}")


AUTO, CHAIN = "auto", "chain"
DEFAULT_SIZE = 7  # Rows of a tree whose options give no size.

TREES = (AUTO, CHAIN, *SHAPES, Kary.name, Static.name)  # The values of `tree`.
SIBLINGS = tuple(kind.value for kind in Kind)  # The values of `siblings`.


@dataclass(frozen=True)
class TreeOptions(MethodOptions):
    """The shape of a draft, how siblings are picked, and the verifier.

    tree          a name in `TREES`; "auto" lets a controller choose a chain or a tree
    siblings      how the children of a row are picked, a name in `SIBLINGS`
    branching     children of a row at each level, for a k-ary tree
    tree_parents  the parents of rows 1, 2, ..., where 0 is the root, for a static tree

        TreeOptions("recursive", tree="k-ary", branching=(3, 2),
                    siblings="without-replacement")
    """

    tree: str = AUTO
    siblings: str = Kind.COUPLED.value
    branching: tuple[int, ...] | None = None
    tree_parents: tuple[int, ...] | None = None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        check_choice(DraftingError, "tree", self.tree, TREES)
        check_choice(DraftingError, "siblings", self.siblings, SIBLINGS)
        for key, value, tree in (
            ("branching", self.branching, Kary.name),
            ("tree_parents", self.tree_parents, Static.name),
        ):
            if (value is not None) != (self.tree == tree):
                yield f"drafting options tree={tree} and {key} go together; give both"
        if self.branched and self.kind not in self.shape.kinds:
            allowed = ", ".join(sorted(kind.value for kind in self.shape.kinds))
            fact = f"a {self.tree} tree cannot have {self.siblings} siblings"
            yield f"{fact}; choose {allowed}"
        if not self.branched and self.kind is not Kind.COUPLED:
            fact = "a chain is drafted with coupled noise"
            fix = f"for {self.siblings} drafts give tree=k-ary and branching=1,1,1"
            yield f"{fact}; {fix}"
        parents = self.tree_parents or ()
        has_single_children = (
            not self.branched
            or (self.branching is not None and max(self.branching) == 1)
            or (bool(parents) and len(set(parents)) == len(parents))
        )
        if self.checker.single_child and not has_single_children:
            fix = "give tree=k-ary, branching=1,1,1 and siblings=with-replacement, or "
            fix += "verifier=recursive"
            yield f"verifier {self.verifier!r} takes one child per row; {fix}"
        size, most = self.draft_size, WIDEST - 1
        if size is not None and size > most:
            yield f"a tree of {size} rows is wider than a pass; draft at most {most}"

    @property
    def branched(self) -> bool:
        return self.tree not in (AUTO, CHAIN)

    @property
    def may_branch(self) -> bool:
        return self.tree == AUTO and super().may_branch

    @property
    def kind(self) -> Kind:
        """The rule that picks the children of a row, as a `Kind`."""
        return Kind(self.siblings)

    @property
    def shape(self) -> Shape:
        """A new shape as `tree` names it, for options that are `branched`."""
        if self.branching is not None:
            return Kary(self.branching)
        if self.tree_parents is not None:
            return Static(self.tree_parents)
        return SHAPES[self.tree]()

    @property
    def size_is_fixed(self) -> bool:
        return self.branching is not None or self.tree_parents is not None

    @property
    def draft_size(self) -> int | None:
        if self.branching is not None:
            return sum(itertools.accumulate(self.branching, lambda a, b: a * b))
        if self.tree_parents is not None:
            return len(self.tree_parents)
        return DEFAULT_SIZE if self.branched else None
