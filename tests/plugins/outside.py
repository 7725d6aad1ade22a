"""What a program sees that imports jetdraft beside the installed packages: JSON."""

import json
import sys
import warnings
from itertools import product

import jetdraft
from jetdraft.methods import methods
from jetdraft.runtime.measured.cost_model import Curve, Profit
from jetdraft.runtime.planning.drafting import Drafting

PROMPT = "The robot sees"
SAMPLINGS = ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2})
LENGTHS = (1, 2, 4, None)
REPEATING = {"logit_bias": {65: 100.0}, "max_new_tokens": 40, "ignore_eos": True}


def look(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = list(methods())
    with jetdraft.load(folder, threads=1) as model:
        plain = write(model, "none").token_ids
        return {
            "methods": names,
            "warnings": [str(warning.message) for warning in caught],
            "kinds": sorted({warning.category.__name__ for warning in caught}),
            "of_model": model.methods,
            "plain": plain == write(model, "lookup").token_ids,
            **(guest(model) if "again" in names else {}),
        }


def write(model, method, **options):
    how = {"max_new_tokens": 48, "ignore_eos": True, **options}
    return model.generate(PROMPT, method=method, **how)


def guest(model):
    texts = []
    for sampling, length in product(SAMPLINGS, LENGTHS):
        drafted = write(model, "again", num_draft_tokens=length, **sampling)
        same = drafted.token_ids == write(model, "none", **sampling).token_ids
        texts.append([same, length, drafted.stats.drafted_tokens])
    lineup = model.planner.proposer_set(Drafting("auto"))
    # As on a machine with free rows, where other drafts take long; it stays so.
    curve = model.parts.curve
    Curve.learn = lambda self, round_: None
    Profit.add_planned = lambda self, round_: 0  # whatever a busy clock says
    curve.passes = dict.fromkeys(curve.passes, 1.0)
    curve.drafts = {name: 0.0 if name == "again" else 1e3 for name in methods()}
    plain = model.generate(PROMPT, method="none", **REPEATING)
    auto = model.generate(PROMPT, method="auto", **REPEATING)
    return {
        "texts": texts,
        "lineup": [proposer.traits.name for proposer in lineup.proposers],
        "auto": [auto.token_ids == plain.token_ids, auto.stats.to_json()["by_method"]],
    }


print(json.dumps(look(sys.argv[1])))
