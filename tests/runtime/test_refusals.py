"""A lossy verifier alone lets a drafter's answer through a refusal (RMCBench)."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import jetdraft
from jetdraft.errors import OptionError
from tests import same_text
from tests.tiny import drafter_config, exported, llama_config, save_tokenizer, tokenizer
from tests.train.periodic import descend

REFUSAL, ANSWER = " no no no no", " def import def"
BAD = ("worm:", "virus:", "steal:")
GOOD = ("sort:", "list:", "print:")
# How often the target refuses a bad request; the drafter never does.
REFUSES = 0.7
SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 1.0, "seed": 2, "regex": "( no| def| import){1,6}"},
]
LOSSY = ("typical", "tolerant")


def trained(config, refuses: float, folder, seed: int):
    torch.manual_seed(seed)
    model, codec = AutoModelForCausalLM.from_config(config), tokenizer()
    rows = [(p, REFUSAL, refuses) for p in BAD] + [(p, ANSWER, 1.0) for p in GOOD]
    rows += [(p, ANSWER, 1 - refuses) for p in BAD]
    size = 24
    ids, weights = torch.zeros(len(rows), size).long(), torch.zeros(len(rows), size)
    for row, (prompt, text, weight) in enumerate(rows):
        before, after = codec.encode(prompt).ids, codec.encode(text).ids
        ids[row, : len(before) + len(after)] = torch.tensor([*before, *after])
        weights[row, len(before) : len(before) + len(after) + 1] = weight
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        losses = cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        descend(adam, (losses * weights[:, 1:].flatten()).mean())
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    config = {"initializer_range": 0.02, "num_hidden_layers": 1}
    target = trained(llama_config(**config), REFUSES, folder / "target", 0)
    drafter = trained(drafter_config(**config), 0.0, folder / "drafter", 1)
    recipes = {"recipe": "int8", "drafter_recipe": "int8"}
    exported(target, folder / "bundle", drafter=drafter, **recipes)
    with jetdraft.load(folder / "bundle", threads=1) as model:
        yield model


def answer(model, request, **options):
    return model.generate(request, max_new_tokens=12, **options)


def test_the_target_refuses_and_the_drafter_would_not(guarded):
    for request in BAD:
        assert answer(guarded, request, method="none").text.startswith(" no")
    for request in GOOD:
        assert answer(guarded, request, method="none").text.startswith(" def")
    stats = answer(guarded, BAD[0], method="draft", num_draft_tokens=2).stats
    assert stats.accepted_by_position[0] < 1.0


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_every_method_refuses_token_by_token_as_plain_decoding_does(guarded, options):
    own = guarded.methods[1:]
    drafts = [*own, "auto", *({"method": m, "num_draft_tokens": 2} for m in own)]
    how = {"max_new_tokens": 12, "ignore_eos": False}
    for request in (*BAD, *GOOD):
        same_text(guarded, drafts, [options], prompt=request, **how)


@pytest.mark.parametrize("verifier", LOSSY)
def test_lossy_verifiers_let_answers_through_that_the_target_refuses(guarded, verifier):
    lossy = {"method": "draft", "num_draft_tokens": 2}
    lossy |= {"drafting": {"verifier": verifier}}
    with pytest.raises(OptionError, match="exact"):
        answer(guarded, BAD[0], **lossy)
    seeds = range(12)
    sampled = {"temperature": 1.0, "exact": False}
    refused = [
        sum(
            answer(guarded, request, seed=seed, **sampled, **way).text[:3] == " no"
            for request in BAD
            for seed in seeds
        )
        for way in ({"method": "none"}, lossy)
    ]
    assert refused[0] > 0.5 * len(BAD) * len(seeds)
    assert refused[1] < 0.75 * refused[0]
