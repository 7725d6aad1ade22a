"""Options of trees and verifiers, and what contradicts itself."""

import dataclasses

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.sampling.verifiers import VERIFIERS

IDS = np.random.default_rng(1).integers(0, 288, 30)
DRAFT = {"method": "draft", "token_ids": IDS}
KARY = {**DRAFT, "tree": "k-ary", "branching": [2, 2]}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({**DRAFT, "tree": "oak"}, OptionError, "unknown tree"),
        ({**DRAFT, "siblings": "twins"}, OptionError, "unknown siblings"),
        ({**DRAFT, "verifier": "judge"}, OptionError, "unknown verifier"),
        ({"token_ids": IDS, "tree": "best"}, OptionError, "method draft"),
        ({**DRAFT, "tree": "k-ary"}, OptionError, "go together"),
        ({**DRAFT, "branching": [2]}, OptionError, "go together"),
        ({**DRAFT, "tree": "static"}, OptionError, "go together"),
        ({**DRAFT, "tree": "static", "tree_parents": [0, 2]}, OptionError, "before"),
        ({**KARY, "branching": [4, 4]}, OptionError, "wider than a pass"),
        ({**KARY, "branching": [0]}, OptionError, "1 or more"),
        ({**KARY, "num_draft_tokens": 3}, OptionError, "its own size"),
        ({**DRAFT, "siblings": "with-replacement"}, OptionError, "1,1,1"),
        (
            {**DRAFT, "tree": "rerank", "siblings": "with-replacement"},
            OptionError,
            "cannot have",
        ),
        ({**KARY, "verifier": "typical"}, OptionError, "no-exact"),
        ({**KARY, "verifier": "recursive"}, OptionError, "no-exact"),
        (
            {**KARY, "verifier": "recursive", "exact": False},
            OptionError,
            "not made for coupled",
        ),
        (
            {**DRAFT, "verifier": "rejection", "exact": False},
            OptionError,
            "not made for coupled",
        ),
        (
            {**DRAFT, "tree": "heap", "verifier": "rejection", "exact": False},
            OptionError,
            "one child per row",
        ),
        (
            {"token_ids": IDS, "method": "none", "verifier": "k-seq", "exact": False},
            OptionError,
            "means nothing",
        ),
        ({**DRAFT, "num_draft_tokens": 2.5}, OptionError, "not an integer"),
        ({**DRAFT, "num_draft_tokens": True}, OptionError, "not an integer"),
        ({**DRAFT, "max_new_tokens": "8"}, OptionError, "not an integer"),
        ({**DRAFT, "seed": 1.5}, OptionError, "not an integer"),
        ({**DRAFT, "temperature": "1"}, OptionError, "not a number"),
        ({**KARY, "branching": 3}, OptionError, "list of integers"),
        ({**KARY, "branching": "3,2"}, OptionError, "list of integers"),
        ({**DRAFT, "tree": "static", "tree_parents": []}, OptionError, "no rows"),
        (
            {"token_ids": IDS, "method": "lookup", "verifier": "k-seq", "exact": False},
            OptionError,
            "not made for deterministic",
        ),
    ],
)
def test_contradictions_are_refused(model, options, error, words):
    with pytest.raises(error, match=words):
        model.stream(**options)


def test_a_tree_of_models_that_only_chain_is_refused(model, monkeypatch):
    contract = dataclasses.replace(model.parts.target.contract, tree=False)
    monkeypatch.setattr(model.parts.target, "contract", contract)
    with pytest.raises(OptionError, match="chains only"):
        model.stream(**DRAFT, tree="best")


TREES = [
    *({"tree": t} for t in ("best", "heap", "threshold", "rerank", "comb", "merged")),
    {"tree": "best", "siblings": "deterministic", "num_draft_tokens": 15},
    {"tree": "heap", "siblings": "without-replacement"},
    {"tree": "k-ary", "branching": [2, 2], "siblings": "top-and-one"},
    {"tree": "static", "tree_parents": [0, 0, 1, 2]},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_tree_changes_the_text(model, tree, temperature):
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 60}
    plain = model.generate(token_ids=IDS, method="none", **options)
    result = model.generate(**DRAFT, **tree, **options)
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
    result = model.generate(
        **DRAFT, **widths, tree="k-ary", branching=branching, siblings=kind,
        verifier=name,
    )  # fmt: skip
    assert result.token_ids == plain.token_ids
