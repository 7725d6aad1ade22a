"""Published heads in every precision: texts, and capture as a CUDA graph."""

import pytest

import jetdraft
from tests.export.conftest import KINDS, MTP
from tests.export.test_capture import assert_captured

PROMPT = " the self"
WAYS = ({}, {"temperature": 1.0, "seed": 4, "top_p": 0.95})
METHODS = {name: kind.method for name, kind in KINDS.items()}
METHODS |= dict.fromkeys(MTP, "eagle")
BLOCKS = [
    {"num_draft_tokens": 5, "drafting": {"confidence": 0.0}},
    {"num_draft_tokens": 5, "drafting": {"confidence": 0.0, "steps": 2}},
]
CHAINS = {
    "eagle": [{"num_draft_tokens": 3}],
    "medusa": [{"num_draft_tokens": 3}],
    "dflash": BLOCKS,
    "diffusion": BLOCKS,
}
TREES = [{"drafting": {"tree": "best"}}, {"drafting": {"tree": "heap"}, "exact": False}]
WIDE = {"drafting": {"tree": "k-ary", "branching": (2, 2)}}
INT8, PACKED = {"recipe": "int8"}, {"recipe": "q8_0"}
STANDARD = {"flavour": "standard"}
FP16 = {"recipe": "int8", "provider": "cuda"}
"""Exported for a GPU, which computes in half precision, and run on the CPU."""

BUNDLES = {
    "eagle3 int8": ("eagle3", INT8),
    "eagle3 packed": ("eagle3", PACKED),
    "eagle3 standard": ("eagle3", STANDARD),
    "eagle1 int4": (
        "eagle1-tied",
        {"tied": True, "recipe": "int4-head8", "drafter": "int4"},
    ),
    "eagle1 fp16": ("eagle1", FP16),
    **{name: (name, {}) for name in MTP},
    "medusa": ("medusa", {}),
    "medusa int8": ("medusa", INT8),
    "medusa standard": ("medusa", STANDARD),
    "medusa fp16": ("medusa", FP16),
    "hydra": ("hydra", {}),
    "hydra cut": ("hydra", {"draft_vocab": 100}),
    # An embedding that is quantized as the LM head is.
    "hydra tied": ("hydra", {"tied": True, **INT8}),
    **{
        f"{name} {how}".strip(): (name, options)
        for name in ("dflash", "diffusion")
        for how, options in {
            "": {}, "int8": INT8, "packed": PACKED, "standard": STANDARD, "fp16": FP16,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BUNDLES)
def test_its_drafts_change_no_text(made, case):
    name, options = BUNDLES[case]
    bundle, method = made(name, **options).bundle, METHODS[name]
    with jetdraft.load(bundle.path, provider="cpu", threads=1) as model:
        others = {"draft", "eagle", "medusa", "dflash", "diffusion"} - {method}
        assert method in model.methods
        assert not others & set(model.methods)
        ways = [*CHAINS[method], *TREES, *([] if method == "eagle" else [WIDE])]
        drafts = [{"method": method, **way} for way in ways]
        mixed = [{"method": m} for m in (f"{method},lookup", "lookup", "auto")]
        for way in WAYS:
            how = {"max_new_tokens": 30, "ignore_eos": True, **way}
            plain = model.generate(PROMPT, method="none", **how)
            assert len(set(plain.token_ids)) > 3, "too dull to prove anything"
            for drafting in drafts + mixed:
                drafted = model.generate(PROMPT, **how, **drafting)
                assert drafted.token_ids == plain.token_ids, drafting
                if drafting in drafts:
                    assert drafted.stats.drafted_tokens > 20


@pytest.mark.parametrize(
    "name", ["eagle1", "eagle3", "medusa", "hydra", "dflash", "diffusion"]
)
def test_it_can_be_captured(made, name):
    assert_captured(made(name, **FP16).bundle)
