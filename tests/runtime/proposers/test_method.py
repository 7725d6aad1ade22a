import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from jetdraft import Drafting, OptionError
from jetdraft.methods import (
    Method,
    MethodOptions,
    Proposer,
    Rows,
    Traits,
    methods,
    registered,
)
from jetdraft.methods.stream.method import StreamOptions
from jetdraft.runtime.planning.planner import MAX_PROPOSERS, Planner
from jetdraft.runtime.proposers.drafter_methods import DraftOptions
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from tests import cases, same_text
from tests.programs import refused_option

NOTES = Path("notes.npz")
READ = {
    "count": [("3", 3), (3, 3), ("-2", -2)],
    "share": [("0.25", 0.25), ("1", 1.0), (2, 2.0)],
    "eager": [("true", True), ("false", False), (True, True)],
    "file": [("notes.npz", NOTES), (NOTES, NOTES), (None, None)],
    "levels": [("3,2", (3, 2)), ("4", (4,)), ([3], (3,)), ((3,), (3,)), (None, None)],
    "threshold": [("0.05", 0.05), (0.05, 0.05), ("auto", "auto"), (None, None)],
    "name": [("12", "12")],
    "verifier": [("typical", "typical")],
}
MISREAD = {
    ("count", "an integer"): ["many", "1.5", 1.5, True, None],
    ("share", "a number"): ["half", True, [0.5]],
    ("eager", "true or false"): ["yes", "", 1],
    ("file", "a path"): [7],
    ("levels", "a list of integers, for example 2,1"): ["3,x", "", 3, [2.5], [True]],
    ("threshold", "a number or a text"): [[0.1]],
    ("name", "a text"): [5],
    ("verifier", "a text"): [5],
}
IDS = np.random.default_rng(1).integers(0, 288, 30)
DRAFT = {"method": "draft", "token_ids": IDS}
PRUNED = StreamOptions(prune_threshold=0.05)
KARY = {"tree": "k-ary", "branching": [2, 2]}
CONTRADICTIONS = [
    ({"tree": "oak"}, "unknown tree"),
    ({"siblings": "twins"}, "unknown siblings"),
    ({"verifier": "judge"}, "unknown verifier"),
    ({"tree": "k-ary"}, "go together"),
    ({"branching": [2]}, "go together"),
    ({"tree": "static"}, "go together"),
    ({"tree_parents": [0]}, "go together"),
    ({"tree": "static", "tree_parents": [0, 2]}, "before"),
    ({**KARY, "branching": [4, 4]}, "wider than a pass"),
    ({**KARY, "branching": [0]}, "1 or more"),
    ({"siblings": "with-replacement"}, "1,1,1"),
    ({"tree": "rerank", "siblings": "with-replacement"}, "cannot have"),
    ({**KARY, "verifier": "typical"}, "neither the text .*no-exact"),
    ({"verifier": "tolerant"}, "neither the text .*no-exact"),
    ({"top": 2}, "'walk' has no top; leave it out, or give verifier=tolerant"),
    ({**KARY, "verifier": "recursive"}, "but not the text .*no-exact"),
    ({"tree": "static", "tree_parents": []}, "no rows"),
]
FOR_SOME = [
    ("draft", {**KARY, "verifier": "recursive"}, "for coupled"),
    ("draft", {"verifier": "rejection"}, "for coupled"),
    ("draft", {"tree": "heap", "verifier": "rejection"}, "one child per row"),
    ("none", {"verifier": "k-seq"}, "has no meaning"),
    ("lookup", {"verifier": "k-seq"}, "for deterministic"),
]
TREES = [
    *({"tree": t} for t in ("best", "heap", "threshold", "rerank", "comb", "merged")),
    {"tree": "heap", "siblings": "without-replacement"},
    {"tree": "k-ary", "branching": [2, 2], "siblings": "top-and-one"},
    {"tree": "static", "tree_parents": [0, 0, 1, 2]},
]
WIDE = {"tree": "best", "siblings": "deterministic"}


@dataclass(frozen=True)
class EveryType(MethodOptions):
    count: int = 1
    share: float = 0.5
    eager: bool = False
    file: Path | None = None
    levels: tuple[int, ...] | None = None
    threshold: float | str | None = None
    name: str = ""


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [(key, *pair) for key, pairs in READ.items() for pair in pairs],
)
def test_a_value_is_read_as_its_type(key, value, expected):
    read = getattr(EveryType.of({key: value}), key)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [(key, v, words) for (key, words), values in MISREAD.items() for v in values],
)
def test_a_value_of_another_type_is_refused(key, value, words):
    pattern = rf"drafting option {key} cannot be .*; give {words}"
    for make in (EveryType.of, lambda settings: EveryType(**settings)):
        with refused_option(pattern):
            make({key: value})


def test_a_field_of_a_type_that_no_option_has_is_refused():
    @dataclass(frozen=True)
    class Odd(MethodOptions):
        names: frozenset[str] = frozenset()

    with pytest.raises(OptionError, match="names has a field of type frozenset"):
        Method("odd", "an odd field", lambda parts, options: None, Odd)


def test_an_unknown_key_is_refused_with_all_keys():
    keys = (
        "verifier, user, select_kv, top, tolerance, count, share, eager, file, levels, "
        "threshold, name"
    )
    with refused_option(f"option 'size'; choose {keys}$"):
        EveryType.of({"size": 1})


@pytest.mark.parametrize("name", ["", "auto", "none", "a,b", "a b", "-"])
def test_names_that_cannot_be(name):
    with refused_option("cannot name a method", "method"):
        Method(name, "nothing", lambda parts, options: None)


class Same(Proposer):
    traits = Traits("same", max_draft_tokens=4)

    def __init__(self, token):
        self.token = token
        self.asked = 0

    def propose(self, context, budget, parents=None):
        self.asked += 1
        return Rows.chain([context[-1], *[self.token] * budget])


def same(proposer, name="same"):
    return Method(name, "one token", lambda parts, options: proposer, EveryType)


def test_a_registered_method_is_there_for_a_while():
    before = dict(methods())
    with registered(same(Same(5))):
        assert [*methods()] == [*before, "same"]
        assert isinstance(Drafting("same").options["same"], EveryType)
    assert [*methods().items()] == [*before.items()]
    with pytest.raises(OptionError, match="unknown method 'same'"):
        Drafting("same")


def test_the_registry_is_restored_after_an_error_and_a_replacement():
    before = dict(methods())
    other = same(Same(5), "lookup")
    with registered(other):
        assert methods()["lookup"] is other
    with pytest.raises(KeyError, match="moon"), registered(same(Same(5))):
        methods()["moon"]
    assert [*methods().items()] == [*before.items()]
    with pytest.raises(TypeError):
        methods()["same"] = same(Same(5))


def test_each_method_of_a_name_has_its_own_proposer(model):
    how = {"max_new_tokens": 8, "num_draft_tokens": 2, "ignore_eos": True}
    plain = model.generate(token_ids=[5, 8], method="none", max_new_tokens=8)
    for proposer in (Same(5), Same(6)):
        with registered(same(proposer)):
            assert "same" in model.methods
            found = model.generate(token_ids=[5, 8], method="same", **how)
        assert proposer.asked > 0
        assert found.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert "same" not in model.methods


def test_a_proposer_lives_on_with_its_options(model):
    made = []

    def make(parts, options):
        made.append(options.count)
        return Same(options.count)

    how = {"max_new_tokens": 4, "num_draft_tokens": 2, "method": "same"}
    with registered(Method("same", "one token", make, EveryType)):
        for count in (1, 2, 1, 2):
            model.generate(token_ids=[5, 8], drafting={"count": count}, **how)
    assert made == [1, 2]


@cases(
    "error, words",
    (OptionError("no moon; export it", "method"), "no method 'moon': no moon; "),
    (OptionError("no moon; export it", ""), "no method 'moon': no moon; export it"),
    (KeyError("boom"), "method 'moon' failed"),
    ids=repr,
)
def test_a_method_that_cannot_be_made_is_left_out_of_auto(model, error, words):
    with registered(Method("moon", "the moon", Mock(side_effect=error))):
        assert "moon" not in model.methods
        how = {"token_ids": [5, 8], "max_new_tokens": 4}
        assert model.generate(method="auto", **how).token_ids
        with refused_option(words, "method"):
            model.generate(method="moon", **how)


def test_auto_refuses_wrong_options_of_a_method(model):
    def make(parts, options):
        if options.count > 4:
            raise OptionError("count is too large for this bundle; give 4", "drafting")
        return Same(5)

    with registered(Method("same", "one token", make, EveryType)):
        with refused_option("count is too large"):
            model.generate(token_ids=[5, 8], drafting={"count": 5})
        model.generate(token_ids=[5, 8], drafting={"count": 4}, max_new_tokens=4)


def test_auto_leaves_out_who_wants_to_be_left_out(model):
    with registered(replace(same(Same(5)), in_auto=lambda options: options.eager)):
        for eager in (True, False):
            lineup = model.planner.proposer_set(Drafting(settings={"eager": eager}))
            names = [proposer.traits.name for proposer in lineup.proposers]
            assert ("same" in names) == eager


BEST = {"drafting": {"tree": "best"}}
STOPPED = {"drafting": {"stopping": "product"}}
CUT = {"drafting": {"prune_threshold": 0.1}}
OTHERS = [
    ("auto", BEST, "method draft"),
    ("auto", CUT, "needs one method; give --method stream"),
    ("draft,lookup", BEST, "method draft"),
    ("none", BEST, "no meaning"),
    ("lookup", BEST, "choose ver"),
    ("lookup", STOPPED, "unknown drafting option 'stopping'"),
]


@cases(
    "options, field, words",
    *(({"drafting": it}, "drafting", words) for it, words in CONTRADICTIONS),
    *(
        ({"method": method, "drafting": it, "exact": False}, "drafting", words)
        for method, it, words in FOR_SOME
    ),
    ({"num_draft_tokens": 3, "drafting": KARY}, "num_draft_tokens", "its own size"),
    ({"num_draft_tokens": 2.5}, "num_draft_tokens", "not an integer"),
    ({"num_draft_tokens": True}, "num_draft_tokens", "not an integer"),
    ({"num_draft_tokens": 0}, "num_draft_tokens", "give 1 to 15"),
    ({"max_new_tokens": "8"}, "max_new_tokens", "not an integer"),
    ({"method": "typo"}, "method", "unknown method 'typo'; choose auto, none"),
    ({"method": "draft,guess"}, "method", "unknown method .guess."),
    ({"method": "draft,none"}, "method", "list methods only"),
    ({"method": "draft,auto"}, "method", "list methods only"),
    ({"method": "draft,draft"}, "method", "names a method twice"),
    *(({"method": method, **how}, "drafting", words) for method, how, words in OTHERS),
    ({"method": "none", "num_draft_tokens": 3}, "num_draft_tokens", "no meaning"),
    ({"drafting": PRUNED}, "drafting", "StreamOptions are not options"),
)
def test_options_that_cannot_be(model, options, field, words):
    with refused_option(words, field):
        model.stream(**{**DRAFT, **options})


def test_an_options_object_goes_to_its_method():
    own = DraftOptions(verifier="typical", tree="best")
    drafting = Drafting("draft", exact=False, settings=own)
    assert drafting.options == {"draft": own}
    assert drafting.checker.name == "typical"
    both = Drafting("draft,lookup", settings=MethodOptions(user="ann"))
    assert both.options["lookup"] == MethodOptions(user="ann")
    assert both.options["draft"] == DraftOptions(user="ann")
    assert both.user == "ann"


def test_a_key_goes_to_every_method_that_has_it():
    drafting = Drafting("draft,lookup,recall", settings={"user": "ann"})
    assert {own.user for own in drafting.options.values()} == {"ann"}
    stopping = Drafting("draft,lookup", settings={"stopping": "confidence"})
    rules = {name: vars(o).get("stopping") for name, o in stopping.options.items()}
    assert rules == {"draft": "confidence", "lookup": None}


def test_plain_decoding_has_a_user_too():
    assert Drafting("none", settings={"user": "ann"}).user == "ann"
    with pytest.raises(OptionError, match="user cannot be 5"):
        _ = Drafting("none", settings={"user": 5}).user


@pytest.mark.parametrize("method", ["auto", "draft,trigram"])
def test_a_chain_keeps_every_method_from_branching(model, method):
    for tree, branches in (("auto", True), ("chain", False)):
        lineup = model.planner.proposer_set(Drafting(method, settings={"tree": tree}))
        assert lineup.controller.branching == branches


def test_only_the_last_proposers_live_on(model):
    planner = Planner(model.parts)
    for number in range(MAX_PROPOSERS + 5):
        settings = {"stopping": "confidence", "stop_threshold": number / 100}
        planner.proposer_set(Drafting("draft", settings=settings))
    assert len(planner._proposers) == MAX_PROPOSERS


def test_a_tree_of_models_that_only_chain_is_refused(model, monkeypatch):
    contract = dataclasses.replace(model.parts.target.contract, tree=False)
    monkeypatch.setattr(model.parts.target, "contract", contract)
    monkeypatch.setattr(model.planner, "_proposers", {})
    with refused_option("chains only"):
        model.stream(**DRAFT, drafting={"tree": "best"})


def test_a_tree_wider_than_the_passes_of_a_bundle(model, monkeypatch):
    widths = dataclasses.replace(model.parts.widths, classes=[[1], [2, 4]], base=2)
    monkeypatch.setattr(model.parts.survey, "_widths", widths)
    model.stream(**DRAFT, drafting={**KARY, "branching": [3]})
    with refused_option("has 6 rows, a pass of this bundle holds 3 beside the root"):
        model.stream(**DRAFT, drafting=KARY)


def test_no_tree_changes_the_text(model):
    drafts = [{"method": "draft", "drafting": tree} for tree in (*TREES, WIDE)]
    drafts[-1]["num_draft_tokens"] = 15
    for drafted in same_text(model, drafts, token_ids=IDS, max_new_tokens=60):
        assert drafted.stats.drafted_tokens > 0


@pytest.mark.parametrize("name", sorted(set(VERIFIERS) - {"walk"}))
def test_every_verifier_gives_the_greedy_text(model, name):
    """Of a p that is certain no exact verifier can choose anything else."""
    siblings = {"k-seq": "with-replacement", "greedy-plus-one": "top-and-one"}
    kind = siblings.get(name, "without-replacement")
    branching = [1, 1] if name == "rejection" else [2, 2]
    widths = {"max_new_tokens": 40, "exact": False}
    plain = model.generate(token_ids=IDS, method="none", **widths)
    tree = {"tree": "k-ary", "branching": branching, "siblings": kind}
    result = model.generate(**DRAFT, **widths, drafting={**tree, "verifier": name})
    assert result.token_ids == plain.token_ids
