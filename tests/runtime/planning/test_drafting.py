"""Options of trees and verifiers, and what contradicts itself."""

import dataclasses

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.methods.stream.method import StreamOptions
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.planner import MAX_PROPOSERS, Planner
from jetdraft.runtime.proposers.drafter_methods import DraftOptions
from jetdraft.runtime.proposers.method import MethodOptions
from jetdraft.runtime.sampling.verifiers import VERIFIERS

IDS = np.random.default_rng(1).integers(0, 288, 30)
DRAFT = {"method": "draft", "token_ids": IDS}
PRUNED = StreamOptions(prune_threshold=0.05)
KARY = {"tree": "k-ary", "branching": [2, 2]}


@pytest.mark.parametrize(
    ("drafting", "words"),
    [
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
    ],
)
def test_contradictions_are_refused(model, drafting, words):
    with pytest.raises(OptionError, match=words) as refusal:
        model.stream(**DRAFT, drafting=drafting)
    assert refusal.value.field == "drafting"


@pytest.mark.parametrize(
    ("method", "drafting", "words"),
    [
        ("draft", {**KARY, "verifier": "recursive"}, "for coupled"),
        ("draft", {"verifier": "rejection"}, "for coupled"),
        ("draft", {"tree": "heap", "verifier": "rejection"}, "one child per row"),
        ("none", {"verifier": "k-seq"}, "has no meaning"),
        ("lookup", {"verifier": "k-seq"}, "for deterministic"),
    ],
)
def test_verifiers_are_for_some_drafts(model, method, drafting, words):
    with pytest.raises(OptionError, match=words) as refusal:
        model.stream(method=method, token_ids=IDS, drafting=drafting, exact=False)
    assert refusal.value.field == "drafting"


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
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
        ({"method": "auto", "drafting": {"tree": "best"}}, "drafting", "method draft"),
        ({"method": "draft,lookup", "drafting": {"tree": "best"}},
         "drafting", "method draft"),
        ({"method": "none", "drafting": {"tree": "best"}}, "drafting", "no meaning"),
        ({"method": "none", "num_draft_tokens": 3}, "num_draft_tokens", "no meaning"),
        ({"method": "lookup", "drafting": {"tree": "best"}}, "drafting", "choose ver"),
        ({"method": "lookup", "drafting": {"stopping": "product"}},
         "drafting", "unknown drafting option 'stopping'"),
        ({"drafting": PRUNED}, "drafting", "StreamOptions are not options"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(model, options, field, words):
    with pytest.raises(OptionError, match=words) as refusal:
        model.stream(**{**DRAFT, **options})
    assert refusal.value.field == field


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
    with pytest.raises(OptionError, match="chains only") as refusal:
        model.stream(**DRAFT, drafting={"tree": "best"})
    assert refusal.value.field == "drafting"


def test_a_tree_wider_than_the_passes_of_a_bundle(model, monkeypatch):
    widths = dataclasses.replace(model.parts.widths, classes=[[1], [2, 4]], base=2)
    monkeypatch.setattr(model.parts.survey, "_widths", widths)
    model.stream(**DRAFT, drafting={**KARY, "branching": [3]})
    words = "has 6 rows, a pass of this bundle holds 3 beside the root"
    with pytest.raises(OptionError, match=words) as refusal:
        model.stream(**DRAFT, drafting=KARY)
    assert refusal.value.field == "drafting"


TREES = [
    *({"tree": t} for t in ("best", "heap", "threshold", "rerank", "comb", "merged")),
    {"tree": "heap", "siblings": "without-replacement"},
    {"tree": "k-ary", "branching": [2, 2], "siblings": "top-and-one"},
    {"tree": "static", "tree_parents": [0, 0, 1, 2]},
]
WIDE = {"tree": "best", "siblings": "deterministic"}


@pytest.mark.parametrize(
    ("tree", "size"), [*((tree, None) for tree in TREES), (WIDE, 15)], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_tree_changes_the_text(model, tree, size, temperature):
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 60}
    plain = model.generate(token_ids=IDS, method="none", **options)
    result = model.generate(**DRAFT, drafting=tree, num_draft_tokens=size, **options)
    assert result.token_ids == plain.token_ids
    assert result.stats.drafted_tokens > 0


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
